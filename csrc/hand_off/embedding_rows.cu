// Reads rows of an embedding table in page-locked host memory over PCIe, in a kernel that a CUDA graph can capture: neither a
// copy engine nor a host thread needs the ids.

#include <algorithm>
#include <cstdint>

#include <torch/headeronly/macros/Macros.h>

#include "../launch_sizes.cuh"
#include "../operators.cuh"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using zero_inference::current_stream;

using namespace zero_inference::hand_off;  // launch sizes

// `table` [rows, columns] and `out` [tokens, columns], in vectors. An id out of range fails a device assertion, as in PyTorch.
template <typename Vector>
__global__ void __launch_bounds__(kThreads)
    gather(const int64_t* __restrict__ ids, int64_t tokens, const Vector* __restrict__ table, int64_t rows, int64_t columns,
           Vector* __restrict__ out) {
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < tokens * columns; i += stride) {
    const int64_t token = i / columns;
    const int64_t id = ids[token];
    const bool is_row = id >= 0 && id < rows;
    CUDA_KERNEL_ASSERT(is_row);
    if (is_row) out[i] = __ldcs(table + id * columns + (i - token * columns));
  }
}

template <typename Vector>
void launch(const Tensor& ids, const Tensor& table, const Tensor& out, int64_t row_bytes) {
  const int64_t columns = row_bytes / static_cast<int64_t>(sizeof(Vector));
  const int64_t blocks = std::min<int64_t>(kMostRowBlocks, (ids.numel() * columns + kThreads - 1) / kThreads);
  gather<<<static_cast<unsigned int>(blocks), kThreads, 0, current_stream(ids.get_device_index())>>>(
      static_cast<const int64_t*>(ids.const_data_ptr()), ids.numel(), static_cast<const Vector*>(table.const_data_ptr()),
      table.size(0), columns, static_cast<Vector*>(out.mutable_data_ptr()));
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

void embedding_rows(const Tensor& ids, const Tensor& table, const Tensor& out) {
  STD_TORCH_CHECK(ids.is_cuda() && ids.is_contiguous() && ids.scalar_type() == ScalarType::Long,
                  "embedding_rows: ids must be int64, contiguous, on a CUDA device");
  STD_TORCH_CHECK(!table.is_cuda() && table.is_contiguous() && table.dim() == 2,
                  "embedding_rows: table must be [rows, columns], contiguous, in page-locked host memory");
  STD_TORCH_CHECK(out.is_cuda() && out.get_device_index() == ids.get_device_index() && out.is_contiguous() &&
                      out.scalar_type() == table.scalar_type() && out.numel() == ids.numel() * table.size(1),
                  "embedding_rows: out must be [ids, columns] of the table's dtype, contiguous, on the device of ids");
  if (out.numel() == 0) return;
  const torch::stable::accelerator::DeviceGuard guard(ids.get_device_index());
  const int64_t row_bytes = table.size(1) * static_cast<int64_t>(table.element_size());
  STD_TORCH_CHECK(row_bytes % 2 == 0, "embedding_rows: elements must be of 2 or 4 bytes");
  const auto addresses =
      reinterpret_cast<uintptr_t>(table.const_data_ptr()) | reinterpret_cast<uintptr_t>(out.const_data_ptr());
  if ((static_cast<uintptr_t>(row_bytes) | addresses) % sizeof(uint4) == 0) {
    launch<uint4>(ids, table, out, row_bytes);
  } else {
    launch<unsigned short>(ids, table, out, row_bytes);
  }
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(zero_inference, library) {
  library.def("embedding_rows(Tensor ids, Tensor table, Tensor(a!) out) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(zero_inference, CUDA, library) { library.impl("embedding_rows", TORCH_BOX(&embedding_rows)); }
