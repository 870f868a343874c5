// zero_inference::poly_norm and poly_norm_backward on CUDA; their schemas are in zero_inference/norms/ops.py.

#include "poly_backward.cuh"
#include "poly_forward.cuh"
#include "tensors.cuh"

namespace {

using namespace zero_inference::norms;

struct Inputs {
  const void *x, *mul, *weight, *bias, *offsets;
  int64_t experts;
};

Inputs inputs_of(Call& call, const Tensor& x, const std::optional<Tensor>& mul, const Tensor& weight, const Tensor& bias,
                 const std::optional<Tensor>& offsets) {
  const int64_t numel = call.rows * call.columns;
  Inputs inputs = {};
  inputs.experts = offsets.has_value() ? offsets->numel() : 1;
  inputs.x = call.input("x", x, numel);
  inputs.mul = call.optional_input("mul", mul, numel);
  inputs.weight = call.input("weight", weight, 3 * inputs.experts);
  inputs.bias = call.input("bias", bias, inputs.experts);
  if (offsets.has_value()) inputs.offsets = call.input("offsets", *offsets, inputs.experts, ScalarType::Int);
  return inputs;
}

template <typename T>
Poly<T> arguments(const Call& call, const Inputs& inputs, double eps) {
  Poly<T> a = {};
  a.x = static_cast<const T*>(inputs.x);
  a.mul = static_cast<const T*>(inputs.mul);
  a.weight = static_cast<const T*>(inputs.weight);
  a.bias = static_cast<const T*>(inputs.bias);
  a.offsets = static_cast<const int32_t*>(inputs.offsets);
  a.rows = call.rows;
  a.columns = static_cast<int>(call.columns);
  a.experts = static_cast<int>(inputs.experts);
  a.eps = static_cast<float>(eps);
  return a;
}

Tensor poly_norm(const Tensor& x, const std::optional<Tensor>& mul, const Tensor& weight, const Tensor& bias,
                 const std::optional<Tensor>& offsets, double eps) {
  Call call("poly_norm", x);
  const Inputs inputs = inputs_of(call, x, mul, weight, bias, offsets);
  Tensor out = call.output_like(x);
  call.with_type([&](auto zero) {
    using T = decltype(zero);
    Poly<T> a = arguments<T>(call, inputs, eps);
    a.out = static_cast<T*>(out.mutable_data_ptr());
    poly_forward(a, call.device());
  });
  return out;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> poly_norm_backward(const Tensor& grad, const Tensor& x,
                                                              const std::optional<Tensor>& mul, const Tensor& weight,
                                                              const Tensor& bias, const std::optional<Tensor>& offsets,
                                                              double eps) {
  Call call("poly_norm_backward", x);
  const Inputs inputs = inputs_of(call, x, mul, weight, bias, offsets);
  const void* grads = call.input("grad", grad, call.rows * call.columns);
  Tensor grad_x = call.output_like(x);
  Tensor grad_mul = mul.has_value() ? call.output_like(x) : call.empty_output();
  Tensor grad_weight = call.output_like(weight);
  Tensor grad_bias = call.output_like(bias);
  call.with_type([&](auto zero) {
    using T = decltype(zero);
    Poly<T> a = arguments<T>(call, inputs, eps);
    a.grad = static_cast<const T*>(grads);
    a.grad_x = static_cast<T*>(grad_x.mutable_data_ptr());
    a.grad_mul = mul.has_value() ? static_cast<T*>(grad_mul.mutable_data_ptr()) : nullptr;
    a.grad_weight = static_cast<T*>(grad_weight.mutable_data_ptr());
    a.grad_bias = static_cast<T*>(grad_bias.mutable_data_ptr());
    poly_backward(a, call.device(), [&](int64_t count) { return call.scratch(count); });
  });
  return {grad_x, grad_mul, grad_weight, grad_bias};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(zero_inference, CUDA, library) {
  library.impl("poly_norm", TORCH_BOX(&poly_norm));
  library.impl("poly_norm_backward", TORCH_BOX(&poly_norm_backward));
}
