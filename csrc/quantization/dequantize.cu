// zero_inference::dequantize_groups: a quantized weight [rows, columns] back to float16, bfloat16 or float32.
//
//   out = round(code * scale + minimum)   or   round((number(code) - zero point) * scale)
//
// A row's scale multiplies or divides its other scales first. Each step is rounded to float32, the last one to the output type:
// the same bits as `dequantize_reference` in zero_inference/kernels/formats.py. Code i is at bit `bits * i`, little-endian: the
// even element of a pair of four bits has the low nibble.

#include <limits>
#include <optional>

#include "../operators.cuh"
#include "product.cuh"

namespace zero_inference::quantization {
namespace {

using OptionalTensor = std::optional<Tensor>;

// `scale` and `offset` have [groups of rows, row_groups] elements; the last group of rows may be smaller.
struct Weight {
  const uint8_t* codes;
  const void* scale;       // or null
  const void* offset;      // minima in the dtype of scales or zero points in uint8; or null
  const float* row_scale;  // or null
  int64_t columns, group_size, group_rows, row_groups;
  ScalarType scale_dtype;
  bool has_minima, divides;

  // Whether groups follow each other whatever the rows, so that no row has to be found.
  __host__ __device__ bool is_flat() const {
    return group_rows == 1 && columns % group_size == 0 && row_scale == nullptr && scale != nullptr;
  }
};

// Number of a code.
template <Codes kCodes>
__device__ __forceinline__ float number(uint32_t code) {
  if constexpr (kCodes == kE2M1) {  // the bits as a float's: 2^-126 times the number, subnormal where the code is
    return __uint_as_float(__float_as_uint(__uint_as_float((code & 7) << 22) * 0x1p126f) | (code & 8) << 28);
  } else if constexpr (kCodes == kE4M3) {
    if ((code & 0x7f) == 0x7f) return __uint_as_float(0x7fc00000u);
    return __uint_as_float(__float_as_uint(__uint_as_float((code & 0x7f) << 20) * 0x1p120f) | (code & 0x80) << 24);
  } else {
    return static_cast<float>(code);
  }
}

__device__ __forceinline__ float read_scale(ScalarType dtype, const void* from, int64_t index) {
  switch (dtype) {
    case ScalarType::Half:
      return Element<__half>::to_float(static_cast<const __half*>(from)[index]);
    case ScalarType::BFloat16:
      return Element<__nv_bfloat16>::to_float(static_cast<const __nv_bfloat16*>(from)[index]);
    case ScalarType::Float8_e4m3fn:
      return number<kE4M3>(static_cast<const uint8_t*>(from)[index]);
    case ScalarType::Float8_e8m0fnu: {
      const uint32_t exponent = static_cast<const uint8_t*>(from)[index];
      return __uint_as_float(exponent == 255 ? 0x7fc00000u : exponent == 0 ? 0x00400000u : exponent << 23);
    }
    default:
      return static_cast<const float*>(from)[index];
  }
}

// Makes values of the numbers of one group in one row.
struct Line {
  float zero, scale, minimum;
  bool has_minimum;

  __device__ __forceinline__ float value(float number) const {
    const float product = __fmul_rn(__fsub_rn(number, zero), scale);
    return has_minimum ? __fadd_rn(product, minimum) : product;
  }
};

template <Codes kCodes>
__device__ __forceinline__ Line line_of(const Weight& weight, int64_t row, int64_t group) {
  Line line = {0.0f, 1.0f, 0.0f, weight.has_minima};
  if (weight.scale != nullptr) line.scale = read_scale(weight.scale_dtype, weight.scale, group);
  if (weight.row_scale != nullptr) {
    const float of_row = weight.row_scale[row];
    line.scale = weight.divides ? __fdiv_rn(line.scale, of_row) : __fmul_rn(line.scale, of_row);
  }
  if (weight.has_minima) {
    line.minimum = read_scale(weight.scale_dtype, weight.offset, group);
  } else if (weight.offset != nullptr) {
    line.zero = static_cast<float>(static_cast<const uint8_t*>(weight.offset)[group]);
  } else if (kCodes == kInt4 || kCodes == kInt8) {
    line.zero = kCodes == kInt4 ? 8.0f : 128.0f;
  }
  return line;
}

// The codes of one 16-byte store: 2, 4 or 8 bytes.
template <typename T, int kBits, int kBytes = kVector<T> * kBits / 8>
using CodesOfVector =
    std::conditional_t<kBytes == 2, unsigned short, std::conditional_t<kBytes == 4, unsigned int, unsigned long long>>;

// One 16-byte store a vector; neighbouring threads access neighbouring vectors, which never cross a group. `shift` is
// log2(vectors_in_group), negative if not a power of two. kOwn: flat, with scales and minima of type T.
template <typename T, Codes kCodes, bool kOwn>
__global__ void __launch_bounds__(kThreads)
    dequantize_vectors(const Weight weight, uint4* __restrict__ out, int64_t vectors, uint32_t vectors_in_group, int shift) {
  constexpr int kBits = bits_of(kCodes);
  using Word = CodesOfVector<T, kBits>;
  constexpr int64_t kTile = kThreads * kUnroll;
  const Word* __restrict__ codes = reinterpret_cast<const Word*>(weight.codes);
  const bool is_flat = kOwn || weight.is_flat();
  const uint32_t row_vectors = static_cast<uint32_t>(weight.columns / kVector<T>);
  for (int64_t first = blockIdx.x * kTile + threadIdx.x; first < vectors; first += gridDim.x * kTile) {
    Word packed[kUnroll] = {};
    Line lines[kUnroll] = {};
#pragma unroll
    for (int step = 0; step < kUnroll; ++step) {
      const int64_t vector = first + step * kThreads;
      if (vector < vectors) {
        packed[step] = __ldcs(codes + vector);  // read once: leave the cache to what is written
        int64_t group = 0, row = 0;
        if (is_flat) {
          group = shift >= 0 ? vector >> shift : vector / vectors_in_group;
        } else {  // 32 bits: fewer vectors are launched
          const uint32_t of_weight = static_cast<uint32_t>(vector) / row_vectors;
          const uint32_t in_row = static_cast<uint32_t>(vector) - of_weight * row_vectors;
          row = of_weight;
          group = of_weight / static_cast<uint32_t>(weight.group_rows) * weight.row_groups +
                  (shift >= 0 ? in_row >> shift : in_row / vectors_in_group);
        }
        if constexpr (kOwn) {
          lines[step].scale = Element<T>::to_float(static_cast<const T*>(weight.scale)[group]);
          lines[step].minimum = Element<T>::to_float(static_cast<const T*>(weight.offset)[group]);
        } else {
          lines[step] = line_of<kCodes>(weight, row, group);
        }
      }
    }
#pragma unroll
    for (int step = 0; step < kUnroll; ++step) {
      const int64_t vector = first + step * kThreads;
      if (vector < vectors) {
        Chunk<T, kVector<T>> values;
#pragma unroll
        for (int i = 0; i < kVector<T>; ++i) {
          const float code = number<kCodes>(static_cast<uint32_t>(packed[step] >> (kBits * i)) & ((1u << kBits) - 1));
          if constexpr (kOwn) {
            values.value[i] = __fadd_rn(__fmul_rn(code, lines[step].scale), lines[step].minimum);
          } else {
            values.value[i] = lines[step].value(code);
          }
        }
        out[vector] = values.packed();
      }
    }
  }
}

// One byte of codes a thread: for groups that are not whole vectors, and unaligned tensors.
template <typename T, Codes kCodes>
__global__ void __launch_bounds__(kThreads) dequantize_bytes(const Weight weight, T* __restrict__ out, int64_t bytes) {
  constexpr int kBits = bits_of(kCodes);
  constexpr int kInByte = 8 / kBits;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t index = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; index < bytes; index += stride) {
    const uint32_t packed = weight.codes[index];
#pragma unroll
    for (int i = 0; i < kInByte; ++i) {
      const int64_t element = index * kInByte + i;
      const int64_t row = element / weight.columns;
      const int64_t group = row / weight.group_rows * weight.row_groups + (element - row * weight.columns) / weight.group_size;
      const float code = number<kCodes>((packed >> (kBits * i)) & ((1u << kBits) - 1));
      out[element] = Element<T>::round(line_of<kCodes>(weight, row, group).value(code));
    }
  }
}

int log2_or_negative(int64_t value) {
  int shift = 0;
  while ((int64_t{1} << shift) < value) ++shift;
  return (int64_t{1} << shift) == value ? shift : -1;
}

// Calls run(integral_constant) with the kind of codes.
template <typename Run>
void with_codes(int64_t kind, const Run& run) {
  if (kind == kInt4) return run(std::integral_constant<Codes, kInt4>{});
  if (kind == kInt8) return run(std::integral_constant<Codes, kInt8>{});
  kind == kE2M1 ? run(std::integral_constant<Codes, kE2M1>{}) : run(std::integral_constant<Codes, kE4M3>{});
}

// Arguments as `operands` in zero_inference/kernels/quantization.py; out [..., columns]. Checked here: in Python it would take
// 6 us a weight in each pass.
void dequantize_groups(const Tensor& codes, const OptionalTensor& scale, const OptionalTensor& offset,
                       const OptionalTensor& row_scale, int64_t codes_kind, int64_t group_size, int64_t group_rows,
                       bool divides, const Tensor& out) {
  const int64_t numel = out.numel();
  if (numel == 0) return;
  const int64_t columns = out.size(out.dim() - 1), rows = numel / columns;
  const int64_t bits = codes_kind >= kInt4 && codes_kind <= kE4M3 ? bits_of(static_cast<Codes>(codes_kind)) : 0;
  const int64_t row_groups = group_size > 0 ? divided_up(columns, group_size) : 0;
  const int64_t groups = group_rows > 0 ? divided_up(rows, group_rows) * row_groups : 0;
  const auto fits = [&](const Tensor& tensor, ScalarType dtype, int64_t elements) {
    return tensor.is_cuda() && tensor.get_device_index() == out.get_device_index() && tensor.scalar_type() == dtype &&
           tensor.numel() == elements && tensor.is_contiguous();
  };
  const ScalarType scale_dtype = scale.has_value() ? scale->scalar_type() : ScalarType::Float;
  const bool known = scale_dtype == ScalarType::Half || scale_dtype == ScalarType::BFloat16 ||
                     scale_dtype == ScalarType::Float || scale_dtype == ScalarType::Float8_e8m0fnu ||
                     scale_dtype == ScalarType::Float8_e4m3fn;
  const bool has_minima = offset.has_value() && offset->scalar_type() != ScalarType::Byte;
  STD_TORCH_CHECK(bits > 0 && group_size >= 0 && group_rows > 0 && columns * bits % 8 == 0 && known &&
                      fits(out, out.scalar_type(), numel) && fits(codes, ScalarType::Byte, numel * bits / 8) &&
                      scale.has_value() == (group_size > 0) && (!scale.has_value() || fits(*scale, scale_dtype, groups)) &&
                      (!offset.has_value() || fits(*offset, has_minima ? scale_dtype : ScalarType::Byte, groups)) &&
                      (!row_scale.has_value() || fits(*row_scale, ScalarType::Float, rows)),
                  "dequantize_groups: out of ", rows, " x ", columns, " does not fit ", codes.numel(), " bytes of codes and ",
                  scale.has_value() ? scale->numel() : 0, " scales of ", bits, " bits and groups of ", group_rows, " x ",
                  group_size, "; all must be contiguous on CUDA device ", out.get_device_index());
  const auto data = [](const OptionalTensor& tensor) { return tensor.has_value() ? tensor->const_data_ptr() : nullptr; };
  const Weight weight = {read<uint8_t>(codes),
                         data(scale),
                         data(offset),
                         static_cast<const float*>(data(row_scale)),
                         columns,
                         group_size > 0 ? group_size : columns,
                         group_rows,
                         row_groups,
                         scale_dtype,
                         has_minima,
                         divides};
  const TensorDevice device(out);
  const auto blocks = [&](int64_t work, int64_t of_block) {
    return dim3(std::min(divided_up(work, of_block), int64_t{device.multiprocessors()} * kBlocksPerSm));
  };
  const auto run = [&](auto zero, auto codes_of_kind) {
    using T = decltype(zero);
    constexpr Codes kCodes = decltype(codes_of_kind)::value;
    using Word = CodesOfVector<T, bits_of(kCodes)>;
    const int64_t vectors = numel / kVector<T>;
    const bool whole = in_vectors<T>(weight.group_size, out.const_data_ptr()) &&
                       (weight.is_flat() || (columns % kVector<T> == 0 && vectors < std::numeric_limits<uint32_t>::max()));
    if (!whole || !aligned(weight.codes, sizeof(Word))) {
      const int64_t bytes = codes.numel();
      return launch(dequantize_bytes<T, kCodes>, blocks(bytes, kThreads), kThreads, 0, device, weight, write<T>(out), bytes);
    }
    const uint32_t of_group = static_cast<uint32_t>(weight.group_size / kVector<T>);
    const auto launch_vectors = [&](auto kernel) {
      launch(kernel, blocks(vectors, kThreads * kUnroll), kThreads, 0, device, weight, write<uint4>(out), vectors, of_group,
             log2_or_negative(of_group));
    };
    if constexpr (kCodes == kInt4 || kCodes == kInt8) {
      if (has_minima && weight.is_flat() && scale_dtype == out.scalar_type()) {
        return launch_vectors(dequantize_vectors<T, kCodes, true>);
      }
    }
    launch_vectors(dequantize_vectors<T, kCodes, false>);
  };
  with_element(out.scalar_type(), [&](auto zero) { with_codes(codes_kind, [&](auto kind) { run(zero, kind); }); });
}

STABLE_TORCH_LIBRARY_FRAGMENT(zero_inference, library) {
  library.def(
      "dequantize_groups(Tensor codes, Tensor? scale, Tensor? offset, Tensor? row_scale, int codes_kind, int group_size, "
      "int group_rows, bool divides, Tensor(a!) out) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(zero_inference, CUDA, library) { library.impl("dequantize_groups", TORCH_BOX(&dequantize_groups)); }

}  // namespace
}  // namespace zero_inference::quantization
