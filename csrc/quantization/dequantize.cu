// zero_inference::dequantize_groups: int8 / int4 groups back to float16, bfloat16 or float32.
//
//   out[i] = round(code[i] * scale[i / group_size] + minimum[i / group_size])
//
// Product and sum are each rounded to float32, the sum then to the output type: the same bits as `dequantize_reference` in
// zero_inference/kernels/quantization.py. Code i is at bit `bits * i`, little-endian: the even element of an int4 pair has the
// low nibble.

#include <algorithm>
#include <cstdint>

#include "../alignment.cuh"
#include "../elements.cuh"
#include "../launch_sizes.cuh"
#include "../operators.cuh"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

using namespace zero_inference::quantization;  // launch sizes
using zero_inference::aligned;
using zero_inference::Element;
using zero_inference::in_vectors;

template <typename T>
constexpr int kInStore = 16 / static_cast<int>(sizeof(T));  // elements of a 16-byte store

template <int kBytes>
struct CodeWord;
template <>
struct CodeWord<2> {
  using type = unsigned short;
};
template <>
struct CodeWord<4> {
  using type = unsigned int;
};
template <>
struct CodeWord<8> {
  using type = unsigned long long;
};

// The codes of one 16-byte store.
template <typename T, int kBits>
using Codes = typename CodeWord<kInStore<T> * kBits / 8>::type;

__device__ __forceinline__ float restore(uint32_t code, float scale, float minimum) {
  return __fadd_rn(__fmul_rn(static_cast<float>(code), scale), minimum);
}

// One 16-byte store a vector; neighbouring threads access neighbouring vectors, which never cross a group. `shift` is
// log2(vectors_in_group), negative if not a power of two.
template <typename T, int kBits>
__global__ void __launch_bounds__(kThreads)
    dequantize_vectors(const Codes<T, kBits>* __restrict__ codes, const T* __restrict__ scale, const T* __restrict__ minimum,
                       uint4* __restrict__ out, int64_t vectors, int64_t vectors_in_group, int shift) {
  constexpr int kVector = kInStore<T>;
  constexpr int kWordElements = kVector / 4;
  constexpr int64_t kTile = kThreads * kUnroll;
  for (int64_t first = blockIdx.x * kTile + threadIdx.x; first < vectors; first += gridDim.x * kTile) {
    Codes<T, kBits> packed[kUnroll] = {};
    float scales[kUnroll] = {};
    float minima[kUnroll] = {};
#pragma unroll
    for (int step = 0; step < kUnroll; ++step) {
      const int64_t vector = first + step * kThreads;
      if (vector < vectors) {
        const int64_t group = shift >= 0 ? vector >> shift : vector / vectors_in_group;
        packed[step] = __ldcs(codes + vector);  // read once: leave the cache to what is written
        scales[step] = Element<T>::load(scale[group]);
        minima[step] = Element<T>::load(minimum[group]);
      }
    }
#pragma unroll
    for (int step = 0; step < kUnroll; ++step) {
      const int64_t vector = first + step * kThreads;
      if (vector < vectors) {
        float values[kVector];
#pragma unroll
        for (int i = 0; i < kVector; ++i) {
          const uint32_t code = static_cast<uint32_t>(packed[step] >> (kBits * i)) & ((1u << kBits) - 1);
          values[i] = restore(code, scales[step], minima[step]);
        }
        out[vector] = make_uint4(Element<T>::pack(values), Element<T>::pack(values + kWordElements),
                                 Element<T>::pack(values + 2 * kWordElements), Element<T>::pack(values + 3 * kWordElements));
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
    const float group_scale = Element<T>::load(scale[group]);
    const float group_minimum = Element<T>::load(minimum[group]);
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

template <typename T, int kBits>
void launch(const Tensor& codes, const Tensor& scale, const Tensor& minimum, int64_t group_size, const Tensor& out) {
  constexpr int kVector = kInStore<T>;
  const int32_t device = out.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  const cudaStream_t stream = zero_inference::current_stream(device);
  int processors = 0;
  STD_CUDA_CHECK(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device));
  const auto blocks = [processors](int64_t work, int64_t work_of_block) {
    const int64_t wanted = (work + work_of_block - 1) / work_of_block;
    return static_cast<unsigned int>(std::min<int64_t>(wanted, int64_t{processors} * kBlocksOfProcessor));
  };

  const int64_t numel = out.numel();
  const T* scales = static_cast<const T*>(scale.const_data_ptr());
  const T* minima = static_cast<const T*>(minimum.const_data_ptr());
  if (in_vectors<T>(group_size, out.const_data_ptr()) && aligned(codes.const_data_ptr(), sizeof(Codes<T, kBits>))) {
    const int64_t vectors = numel / kVector;
    const unsigned int grid = blocks(vectors, kThreads * kUnroll);
    dequantize_vectors<T, kBits><<<grid, kThreads, 0, stream>>>(
        static_cast<const Codes<T, kBits>*>(codes.const_data_ptr()), scales, minima,
        static_cast<uint4*>(out.mutable_data_ptr()), vectors, group_size / kVector, log2_or_negative(group_size / kVector));
  } else {
    const int64_t bytes = numel * kBits / 8;
    const unsigned int grid = blocks(bytes, kThreads);
    dequantize_bytes<T, kBits><<<grid, kThreads, 0, stream>>>(static_cast<const uint8_t*>(codes.const_data_ptr()), scales,
                                                              minima, static_cast<T*>(out.mutable_data_ptr()), bytes,
                                                              group_size);
  }
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

void dequantize_groups(const Tensor& codes, const Tensor& scale, const Tensor& minimum, int64_t bits, int64_t group_size,
                       const Tensor& out) {
  const ScalarType dtype = out.scalar_type();
  const int64_t numel = out.numel();
  STD_TORCH_CHECK(bits == 8 || bits == 4, "dequantize_groups: bits must be 8 or 4, found ", bits);
  STD_TORCH_CHECK(group_size > 0 && (bits == 8 || group_size % 2 == 0),
                  "dequantize_groups: group_size must be positive, and even ", "for 4 bits, found ", group_size, " for ", bits,
                  " bits");
  STD_TORCH_CHECK(numel % group_size == 0, "dequantize_groups: out must hold whole groups of ", group_size, ", found ", numel,
                  " elements");
  const auto check = [&](const char* name, const Tensor& tensor, ScalarType type, int64_t elements) {
    zero_inference::check_tensor("dequantize_groups", name, tensor, type, elements, out);
  };
  check("out", out, dtype, numel);
  check("codes", codes, ScalarType::Byte, numel * bits / 8);
  check("scale", scale, dtype, numel / group_size);
  check("minimum", minimum, dtype, numel / group_size);
  if (numel == 0) return;

  zero_inference::with_element("dequantize_groups", "out", dtype, [&](auto zero) {
    using T = decltype(zero);
    bits == 8 ? launch<T, 8>(codes, scale, minimum, group_size, out) : launch<T, 4>(codes, scale, minimum, group_size, out);
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(zero_inference, library) {
  library.def("dequantize_groups(Tensor codes, Tensor scale, Tensor minimum, int bits, int group_size, Tensor(a!) out) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(zero_inference, CUDA, library) { library.impl("dequantize_groups", TORCH_BOX(&dequantize_groups)); }
