// zero_inference::poly_norm and poly_norm_backward on CUDA; their schemas are in zero_inference/norms/ops.py.

#include "call.cuh"
#include "poly_backward.cuh"

namespace zero_inference::norms {
namespace {

template <typename T>
Poly<T> arguments(Call& call, const Tensor& x, const std::optional<Tensor>& mul, const Tensor& weight, const Tensor& bias,
                  const std::optional<Tensor>& offsets, double eps) {
  Poly<T> a = {};
  a.x = call.input<T>(x);
  a.mul = call.input<T>(mul);
  a.weight = call.input<T>(weight);
  a.bias = call.input<T>(bias);
  a.offsets = call.input<int32_t>(offsets);
  a.rows = call.rows;
  a.columns = static_cast<int>(call.columns);
  a.experts = offsets.has_value() ? static_cast<int>(offsets->numel()) : 1;
  a.eps = static_cast<float>(eps);
  return a;
}

Tensor poly_norm(const Tensor& x, const std::optional<Tensor>& mul, const Tensor& weight, const Tensor& bias,
                 const std::optional<Tensor>& offsets, double eps) {
  Call call(x);
  Tensor out = call.output_like(x);
  with_element(x.scalar_type(), [&](auto zero) {
    using T = decltype(zero);
    Poly<T> a = arguments<T>(call, x, mul, weight, bias, offsets, eps);
    a.out = write<T>(out);
    poly_forward(a, call);
  });
  return out;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> poly_norm_backward(const Tensor& grad, const Tensor& x,
                                                              const std::optional<Tensor>& mul, const Tensor& weight,
                                                              const Tensor& bias, const std::optional<Tensor>& offsets,
                                                              double eps) {
  Call call(x);
  const int64_t none[] = {0};
  Tensor grad_x = call.output_like(x);
  Tensor grad_mul = mul.has_value() ? call.output_like(x) : torch::stable::new_empty(x, none);
  Tensor grad_weight = call.output_like(weight);
  Tensor grad_bias = call.output_like(bias);
  with_element(x.scalar_type(), [&](auto zero) {
    using T = decltype(zero);
    Poly<T> a = arguments<T>(call, x, mul, weight, bias, offsets, eps);
    a.grad = call.input<T>(grad);
    a.grad_x = write<T>(grad_x);
    a.grad_mul = mul.has_value() ? write<T>(grad_mul) : nullptr;
    a.grad_weight = write<T>(grad_weight);
    a.grad_bias = write<T>(grad_bias);
    poly_backward(a, call, [&](int64_t count) { return call.scratch(count); });
  });
  return {grad_x, grad_mul, grad_weight, grad_bias};
}

STABLE_TORCH_LIBRARY_IMPL(zero_inference, CUDA, library) {
  library.impl("poly_norm", TORCH_BOX(&poly_norm));
  library.impl("poly_norm_backward", TORCH_BOX(&poly_norm_backward));
}

}  // namespace
}  // namespace zero_inference::norms
