// Rotary embedding of queries and keys in one kernel, with each rounding of the PyTorch expression, so that results have its
// bits:
//
//   first  = round(round(x_first * cos_first)   + round(-x_second * sin_first))
//   second = round(round(x_second * cos_second) + round(x_first * sin_second))
//
// where `first` and `second` are the halves of a head's leading `rotated` elements, and the rest of a head is copied. The
// schema is in zero_inference/kernels/rotary.py. PyTorch takes ten kernels for it: 22 us of a layer's decode step, all of it
// launches that wait for each other.

#include <cstdint>

#include "../elements.cuh"
#include "../launch_sizes.cuh"
#include "../operators.cuh"

namespace {

using torch::stable::Tensor;
using zero_inference::current_stream;
using zero_inference::Element;
using zero_inference::rounded;

using namespace zero_inference::fused;  // launch sizes

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
  const float first = Element<T>::load(in[unit]);
  const float second = Element<T>::load(in[unit + sizes.half]);
  // __fmul_rn and __fadd_rn are never contracted to a product and sum with one rounding
  const float first_cos = rounded<T>(__fmul_rn(first, Element<T>::load(cosines[0])));
  const float second_sin = rounded<T>(__fmul_rn(-second, Element<T>::load(sines[0])));
  const float second_cos = rounded<T>(__fmul_rn(second, Element<T>::load(cosines[sizes.second])));
  const float first_sin = rounded<T>(__fmul_rn(first, Element<T>::load(sines[sizes.second])));
  out[unit] = Element<T>::round(__fadd_rn(first_cos, second_sin));
  out[unit + sizes.half] = Element<T>::round(__fadd_rn(second_cos, first_sin));
}

void check(const char* name, const Tensor& tensor, const Tensor& like, int64_t dimensions) {
  STD_TORCH_CHECK(
      tensor.is_cuda() && tensor.get_device_index() == like.get_device_index() && tensor.scalar_type() == like.scalar_type(),
      "rotary_embedding: ", name, " must be ", torch::headeronly::toString(like.scalar_type()), " on CUDA device ",
      like.get_device_index(), " like q");
  STD_TORCH_CHECK(tensor.dim() == dimensions && tensor.stride(dimensions - 1) == 1, "rotary_embedding: ", name, " must have ",
                  dimensions, " dimensions, the last one contiguous");
}

template <typename T>
Heads<T> heads_of(const Tensor& in, const Tensor& out) {
  return {static_cast<const T*>(in.const_data_ptr()),
          static_cast<T*>(out.mutable_data_ptr()),
          in.stride(0),
          in.stride(1),
          in.stride(2),
          out.stride(0),
          out.stride(1),
          out.stride(2)};
}

template <typename T>
Angles<T> angles_of(const Tensor& angles) {
  return {static_cast<const T*>(angles.const_data_ptr()), angles.size(0) == 1 ? 0 : angles.stride(0), angles.stride(1)};
}

template <typename T>
void launch(const Tensor& q, const Tensor& k, const Tensor& cos, const Tensor& sin, const Tensor& q_out, const Tensor& k_out,
            const Sizes& sizes, cudaStream_t stream) {
  const unsigned int blocks = (sizes.all + kRotaryThreads - 1) / kRotaryThreads;
  rotate<T><<<blocks, kRotaryThreads, 0, stream>>>(heads_of<T>(q, q_out), heads_of<T>(k, k_out), angles_of<T>(cos),
                                                   angles_of<T>(sin), sizes);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

void rotary_embedding(const Tensor& q, const Tensor& k, const Tensor& cos, const Tensor& sin, int64_t rotated,
                      const Tensor& q_out, const Tensor& k_out) {
  check("q", q, q, 4), check("k", k, q, 4), check("q_out", q_out, q, 4), check("k_out", k_out, q, 4);
  check("cos", cos, q, 3), check("sin", sin, q, 3);
  const int64_t batch = q.size(0), tokens = q.size(2), head_dim = q.size(3), width = cos.size(2);
  STD_TORCH_CHECK(k.size(0) == batch && k.size(2) == tokens && k.size(3) == head_dim, "rotary_embedding: k must be [", batch,
                  ", heads, ", tokens, ", ", head_dim, "] like q");
  for (int i = 0; i < 4; ++i) {
    STD_TORCH_CHECK(q_out.size(i) == q.size(i) && k_out.size(i) == k.size(i),
                    "rotary_embedding: outputs must have the sizes of q and k");
  }
  for (const Tensor* angles : {&cos, &sin}) {
    STD_TORCH_CHECK((angles->size(0) == 1 || angles->size(0) == batch) && angles->size(1) == tokens && angles->size(2) == width,
                    "rotary_embedding: cos and sin must be [1 or ", batch, ", ", tokens, ", width]");
  }
  STD_TORCH_CHECK(rotated > 0 && rotated % 2 == 0 && rotated <= head_dim && (width == rotated || 2 * width == rotated),
                  "rotary_embedding: rotated must be even, up to ", head_dim, ", and ", width, " or ", 2 * width, "; found ",
                  rotated);
  const int64_t heads = q.size(1) + k.size(1), units = head_dim - rotated / 2;
  if (batch == 0 || tokens == 0 || heads == 0) return;
  constexpr int64_t kMost = int64_t{1} << 31;  // so that sums of them stay unsigned ints
  STD_TORCH_CHECK(batch < kMost && tokens < kMost && heads < kMost && units < kMost && batch * tokens < kMost / units / heads,
                  "rotary_embedding: too many elements for one call");
  const int64_t half = rotated / 2;
  const Sizes sizes = {static_cast<unsigned int>(batch * tokens * heads * units),
                       static_cast<unsigned int>(units),
                       static_cast<unsigned int>(heads),
                       static_cast<unsigned int>(q.size(1)),
                       static_cast<unsigned int>(tokens),
                       static_cast<unsigned int>(half),
                       static_cast<unsigned int>(width == rotated ? half : 0)};
  const torch::stable::accelerator::DeviceGuard guard(q.get_device_index());
  const cudaStream_t stream = current_stream(q.get_device_index());
  zero_inference::with_element("rotary_embedding", "q", q.scalar_type(),
                               [&](auto zero) { launch<decltype(zero)>(q, k, cos, sin, q_out, k_out, sizes, stream); });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(zero_inference, CUDA, library) { library.impl("rotary_embedding", TORCH_BOX(&rotary_embedding)); }
