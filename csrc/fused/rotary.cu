// Rotary embedding of queries and keys in one kernel, with each rounding of the PyTorch expression, so that results have its
// bits:
//
//   first  = round(round(x_first * cos_first)   + round(-x_second * sin_first))
//   second = round(round(x_second * cos_second) + round(x_first * sin_second))
//
// where `first` and `second` are the halves of a head's leading `rotated` elements, and the rest of a head is copied. The
// schema is in zero_inference/kernels/rotary.py. PyTorch takes ten kernels for it: 22 us of a layer's decode step, all of it
// launches that wait for each other.

#include "../operators.cuh"

namespace zero_inference::fused {
namespace {

// Heads [batch, heads, tokens, head_dim], read and written; elements of a head are contiguous.
template <typename T>
struct Heads {
  const T* in;
  T* out;
  int64_t in_batch, in_head, in_token;  // strides, in elements
  int64_t out_batch, out_head, out_token;
};

// cos or sin, [batch, tokens, width]; a batch of one has a stride of 0.
template <typename T>
struct Angles {
  const T* values;
  int64_t batch, token;  // strides, in elements
};

struct Sizes {
  unsigned int all;      // units of all heads of all tokens, of which each thread has one
  unsigned int units;    // of a head: a pair of elements that are rotated, or one that is copied
  unsigned int heads;    // of queries and keys
  unsigned int q_heads;  // which come first
  unsigned int tokens;   // of a sequence
  unsigned int half;     // pairs of a head
  unsigned int second;   // offset of the second half's angles from the first half's: `half`, or 0 where both share them
};

template <typename T>
__global__ void __launch_bounds__(kRotaryThreads)
    rotate(const Heads<T> q, const Heads<T> k, const Angles<T> cos, const Angles<T> sin, const Sizes sizes) {
  const unsigned int thread = blockIdx.x * kRotaryThreads + threadIdx.x;
  if (thread >= sizes.all) return;
  const unsigned int unit = thread % sizes.units;
  const unsigned int row = thread / sizes.units;
  const unsigned int head = row % sizes.heads;
  const unsigned int token = row / sizes.heads % sizes.tokens;
  const unsigned int batch = row / sizes.heads / sizes.tokens;
  const T* in;
  T* out;
  const auto begin_at = [&](const Heads<T>& x, unsigned int own_head) {
    in = x.in + batch * x.in_batch + own_head * x.in_head + token * x.in_token;
    out = x.out + batch * x.out_batch + own_head * x.out_head + token * x.out_token;
  };
  if (head < sizes.q_heads) {
    begin_at(q, head);
  } else {
    begin_at(k, head - sizes.q_heads);
  }
  if (unit >= sizes.half) {
    out[unit + sizes.half] = in[unit + sizes.half];
    return;
  }
  const T* const cosines = cos.values + batch * cos.batch + token * cos.token + unit;
  const T* const sines = sin.values + batch * sin.batch + token * sin.token + unit;
  const float first = Element<T>::to_float(in[unit]);
  const float second = Element<T>::to_float(in[unit + sizes.half]);
  // __fmul_rn and __fadd_rn are never contracted to a product and sum with one rounding
  const float first_cos = rounded<T>(__fmul_rn(first, Element<T>::to_float(cosines[0])));
  const float second_sin = rounded<T>(__fmul_rn(-second, Element<T>::to_float(sines[0])));
  const float second_cos = rounded<T>(__fmul_rn(second, Element<T>::to_float(cosines[sizes.second])));
  const float first_sin = rounded<T>(__fmul_rn(first, Element<T>::to_float(sines[sizes.second])));
  out[unit] = Element<T>::round(__fadd_rn(first_cos, second_sin));
  out[unit + sizes.half] = Element<T>::round(__fadd_rn(second_cos, first_sin));
}

template <typename T>
Heads<T> heads_of(const Tensor& in, const Tensor& out) {
  return {read<T>(in), write<T>(out), in.stride(0), in.stride(1), in.stride(2), out.stride(0), out.stride(1), out.stride(2)};
}

template <typename T>
Angles<T> angles_of(const Tensor& angles) {
  return {read<T>(angles), angles.size(0) == 1 ? 0 : angles.stride(0), angles.stride(1)};
}

// q, k and their outputs [batch, heads, tokens, head_dim]; cos and sin [1 or batch, tokens, rotated or half of it].
void rotary_embedding(const Tensor& q, const Tensor& k, const Tensor& cos, const Tensor& sin, int64_t rotated,
                      const Tensor& q_out, const Tensor& k_out) {
  const int64_t batch = q.size(0), tokens = q.size(2), half = rotated / 2;
  const int64_t heads = q.size(1) + k.size(1), units = q.size(3) - half;
  if (batch == 0 || tokens == 0 || heads == 0) return;
  // so that sums of them stay unsigned ints
  STD_TORCH_CHECK(batch * tokens < (int64_t{1} << 31) / units / heads, "rotary_embedding: too many elements for one call");
  const Sizes sizes = {static_cast<unsigned int>(batch * tokens * heads * units),
                       static_cast<unsigned int>(units),
                       static_cast<unsigned int>(heads),
                       static_cast<unsigned int>(q.size(1)),
                       static_cast<unsigned int>(tokens),
                       static_cast<unsigned int>(half),
                       static_cast<unsigned int>(cos.size(2) == rotated ? half : 0)};
  const TensorDevice device(q);
  with_element(q.scalar_type(), [&](auto zero) {
    using T = decltype(zero);
    launch(rotate<T>, dim3(divided_up(sizes.all, kRotaryThreads)), kRotaryThreads, 0, device, heads_of<T>(q, q_out),
           heads_of<T>(k, k_out), angles_of<T>(cos), angles_of<T>(sin), sizes);
  });
}

STABLE_TORCH_LIBRARY_IMPL(zero_inference, CUDA, library) { library.impl("rotary_embedding", TORCH_BOX(&rotary_embedding)); }

}  // namespace
}  // namespace zero_inference::fused
