// zero_inference::dequantize_groups: int8 / int4 groups back to float16, bfloat16 or float32.
//
//   out[i] = round(code[i] * scale[i / group_size] + minimum[i / group_size])
//
// Product and sum are each rounded to float32, the sum then to the output type: the same bits as `dequantize_reference` in
// zero_inference/kernels/quantization.py. Code i is at bit `bits * i`, little-endian: the even element of an int4 pair has the
// low nibble.

#include <optional>

#include "../operators.cuh"

namespace zero_inference::quantization {
namespace {

// The codes of one 16-byte store: 2, 4 or 8 bytes.
template <typename T, int kBits, int kBytes = kVector<T> * kBits / 8>
using CodesOfVector =
    std::conditional_t<kBytes == 2, unsigned short, std::conditional_t<kBytes == 4, unsigned int, unsigned long long>>;

__device__ __forceinline__ float restore(uint32_t code, float scale, float minimum) {
  return __fadd_rn(__fmul_rn(static_cast<float>(code), scale), minimum);
}

// One 16-byte store a vector; neighbouring threads access neighbouring vectors, which never cross a group. `shift` is
// log2(vectors_in_group), negative if not a power of two.
template <typename T, int kBits>
__global__ void __launch_bounds__(kThreads)
    dequantize_vectors(const CodesOfVector<T, kBits>* __restrict__ codes, const T* __restrict__ scale,
                       const T* __restrict__ minimum, uint4* __restrict__ out, int64_t vectors, int64_t vectors_in_group,
                       int shift) {
  constexpr int64_t kTile = kThreads * kUnroll;
  for (int64_t first = blockIdx.x * kTile + threadIdx.x; first < vectors; first += gridDim.x * kTile) {
    CodesOfVector<T, kBits> packed[kUnroll] = {};
    float scales[kUnroll] = {};
    float minima[kUnroll] = {};
#pragma unroll
    for (int step = 0; step < kUnroll; ++step) {
      const int64_t vector = first + step * kThreads;
      if (vector < vectors) {
        const int64_t group = shift >= 0 ? vector >> shift : vector / vectors_in_group;
        packed[step] = __ldcs(codes + vector);  // read once: leave the cache to what is written
        scales[step] = Element<T>::to_float(scale[group]);
        minima[step] = Element<T>::to_float(minimum[group]);
      }
    }
#pragma unroll
    for (int step = 0; step < kUnroll; ++step) {
      const int64_t vector = first + step * kThreads;
      if (vector < vectors) {
        Chunk<T, kVector<T>> values;
#pragma unroll
        for (int i = 0; i < kVector<T>; ++i) {
          const uint32_t code = static_cast<uint32_t>(packed[step] >> (kBits * i)) & ((1u << kBits) - 1);
          values.value[i] = restore(code, scales[step], minima[step]);
        }
        out[vector] = values.packed();
      }
    }
  }
}

// One byte of codes a thread: for groups that are not whole vectors, and unaligned tensors.
template <typename T, int kBits>
__global__ void __launch_bounds__(kThreads)
    dequantize_bytes(const uint8_t* __restrict__ codes, const T* __restrict__ scale, const T* __restrict__ minimum,
                     T* __restrict__ out, int64_t bytes, int64_t group_size) {
  constexpr int kInByte = 8 / kBits;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t index = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; index < bytes; index += stride) {
    const uint32_t packed = codes[index];
    const int64_t group = index * kInByte / group_size;
    const float group_scale = Element<T>::to_float(scale[group]);
    const float group_minimum = Element<T>::to_float(minimum[group]);
#pragma unroll
    for (int i = 0; i < kInByte; ++i) {
      const uint32_t code = (packed >> (kBits * i)) & ((1u << kBits) - 1);
      out[index * kInByte + i] = Element<T>::round(restore(code, group_scale, group_minimum));
    }
  }
}

int log2_or_negative(int64_t value) {
  int shift = 0;
  while ((int64_t{1} << shift) < value) ++shift;
  return (int64_t{1} << shift) == value ? shift : -1;
}

// Contiguous: codes uint8, scale and minimum in the dtype of out, one for each `group_size` of its elements. Checked here: in
// Python it would take 6 us a weight in each pass.
void dequantize_groups(const Tensor& codes, const std::optional<Tensor>& scales, const std::optional<Tensor>& minima,
                       const std::optional<Tensor>&, int64_t codes_kind, int64_t group_size, int64_t, bool, const Tensor& out) {
  STD_TORCH_CHECK(codes_kind <= 1 && scales.has_value() && minima.has_value(), "dequantize_groups: unknown format");
  const Tensor &scale = *scales, &minimum = *minima;
  const int64_t bits = codes_kind == 0 ? 4 : 8;
  const int64_t numel = out.numel();
  const auto fits = [&](const Tensor& tensor, ScalarType dtype, int64_t elements) {
    return tensor.is_cuda() && tensor.get_device_index() == out.get_device_index() && tensor.scalar_type() == dtype &&
           tensor.numel() == elements && tensor.is_contiguous();
  };
  STD_TORCH_CHECK((bits == 8 || bits == 4) && group_size > 0 && group_size * bits % 8 == 0 && numel % group_size == 0 &&
                      fits(out, out.scalar_type(), numel) && fits(codes, ScalarType::Byte, numel * bits / 8) &&
                      fits(scale, out.scalar_type(), numel / group_size) &&
                      fits(minimum, out.scalar_type(), numel / group_size),
                  "dequantize_groups: out of ", numel, " elements does not fit ", codes.numel(), " bytes of codes, ",
                  scale.numel(), " scales and ", minimum.numel(), " minima of ", bits, " bits and groups of ", group_size,
                  "; all must be contiguous on CUDA device ", out.get_device_index(), ", scales and minima of out's dtype");
  if (numel == 0) return;
  const TensorDevice device(out);
  const auto blocks = [&](int64_t work, int64_t of_block) {
    return dim3(std::min(divided_up(work, of_block), int64_t{device.multiprocessors()} * kBlocksPerSm));
  };
  const auto run = [&](auto zero, auto bits_of_code) {
    using T = decltype(zero);
    constexpr int kBits = decltype(bits_of_code)::value;
    using Word = CodesOfVector<T, kBits>;
    if (in_vectors<T>(group_size, out.const_data_ptr()) && aligned(codes.const_data_ptr(), sizeof(Word))) {
      const int64_t vectors = numel / kVector<T>, of_group = group_size / kVector<T>;
      launch(dequantize_vectors<T, kBits>, blocks(vectors, kThreads * kUnroll), kThreads, 0, device, read<Word>(codes),
             read<T>(scale), read<T>(minimum), write<uint4>(out), vectors, of_group, log2_or_negative(of_group));
    } else {
      const int64_t bytes = numel * kBits / 8;
      launch(dequantize_bytes<T, kBits>, blocks(bytes, kThreads), kThreads, 0, device, read<uint8_t>(codes), read<T>(scale),
             read<T>(minimum), write<T>(out), bytes, group_size);
    }
  };
  with_element(out.scalar_type(), [&](auto zero) {
    bits == 8 ? run(zero, std::integral_constant<int, 8>{}) : run(zero, std::integral_constant<int, 4>{});
  });
}

STABLE_TORCH_LIBRARY_FRAGMENT(zero_inference, library) {
  library.def("dequantize_groups(Tensor codes, Tensor? scale, Tensor? offset, Tensor? row_scale, int codes_kind, int group_size, "
      "int group_rows, bool divides, Tensor(a!) out) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(zero_inference, CUDA, library) { library.impl("dequantize_groups", TORCH_BOX(&dequantize_groups)); }

}  // namespace
}  // namespace zero_inference::quantization
