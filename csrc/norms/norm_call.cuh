// Calls of the kernels of rms_norm and layer_norm with torch's tensors.
#pragma once

#include "call.cuh"
#include "norm_backward.cuh"
#include "norm_forward.cuh"

namespace zero_inference::norms {

// `residual`, `sum`: null without a sum. offset, round_first: of rms_norm.
template <bool kLayer>
Tensor call_forward(const Tensor& x, const Tensor* residual, const Tensor& weight, const Tensor* bias, double eps,
                    double offset, bool round_first, Tensor* sum) {
  Call call(x);
  Tensor out = call.output_like(x);
  if (sum != nullptr) *sum = call.output_like(x);
  with_element(x.scalar_type(), [&](auto zero) {
    using T = decltype(zero);
    NormForward<T> a = {};
    a.x = call.input<T>(x);
    if (residual != nullptr) a.residual = call.input<T>(*residual);
    a.weight = call.input<T>(weight);
    if (bias != nullptr) a.bias = call.input<T>(*bias);
    a.out = write<T>(out);
    if (sum != nullptr) a.sum = write<T>(*sum);
    a.rows = call.rows;
    a.columns = static_cast<int>(call.columns);
    a.eps = static_cast<float>(eps);
    a.offset = static_cast<float>(offset);
    a.round_first = round_first;
    norm_forward<T, kLayer>(a, call);
  });
  return out;
}

// Gradients of x, weight and, for layer_norm, bias.
template <bool kLayer>
std::vector<Tensor> call_backward(const Tensor& grad, const std::optional<Tensor>& grad_of_sum, const Tensor& x,
                                  const Tensor& weight, double eps, double offset) {
  Call call(x);
  std::vector<Tensor> grads = {call.output_like(x), call.output_like(weight)};
  if (kLayer) grads.push_back(call.output_like(weight));
  with_element(x.scalar_type(), [&](auto zero) {
    using T = decltype(zero);
    NormBackward<T> a = {};
    a.grad = call.input<T>(grad);
    a.grad_of_sum = call.input<T>(grad_of_sum);
    a.x = call.input<T>(x);
    a.weight = call.input<T>(weight);
    a.grad_x = write<T>(grads[0]);
    a.grad_weight = write<T>(grads[1]);
    a.grad_bias = kLayer ? write<T>(grads[2]) : nullptr;
    a.rows = call.rows;
    a.columns = static_cast<int>(call.columns);
    a.eps = static_cast<float>(eps);
    a.offset = static_cast<float>(offset);
    norm_backward<T, kLayer>(a, call, [&](int64_t count) { return call.scratch(count); });
  });
  return grads;
}

}  // namespace zero_inference::norms
