// Reads rows of an embedding table in page-locked host memory over PCIe, in a kernel that a CUDA graph can capture: neither a
// copy engine nor a host thread needs the ids.

#include <torch/headeronly/macros/Macros.h>

#include "../operators.cuh"

namespace zero_inference::hand_off {
namespace {

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

// ids int64, contiguous; table [rows, columns] of 2 or 4 bytes an element; out [ids, columns].
void embedding_rows(const Tensor& ids, const Tensor& table, const Tensor& out) {
  if (out.numel() == 0) return;
  const TensorDevice device(ids);
  const int64_t row_bytes = table.size(1) * static_cast<int64_t>(table.element_size());
  const auto run = [&](auto zero) {
    using Vector = decltype(zero);
    const int64_t columns = row_bytes / static_cast<int64_t>(sizeof(Vector));
    const int64_t blocks = std::min<int64_t>(kMostRowBlocks, divided_up(ids.numel() * columns, kThreads));
    launch(gather<Vector>, dim3(blocks), kThreads, 0, device, read<int64_t>(ids), ids.numel(), read<Vector>(table),
           table.size(0), columns, write<Vector>(out));
  };
  const bool whole = row_bytes % 16 == 0 && aligned(table.const_data_ptr(), 16) && aligned(out.const_data_ptr(), 16);
  whole ? run(uint4{}) : run(static_cast<unsigned short>(0));
}

STABLE_TORCH_LIBRARY_FRAGMENT(zero_inference, library) {
  library.def("embedding_rows(Tensor ids, Tensor table, Tensor(a!) out) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(zero_inference, CUDA, library) { library.impl("embedding_rows", TORCH_BOX(&embedding_rows)); }

}  // namespace
}  // namespace zero_inference::hand_off
