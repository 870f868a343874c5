// Calls of the kernels of rms_norm and layer_norm with torch's tensors.
#pragma once

#include "norm_backward.cuh"
#include "norm_forward.cuh"
#include "tensors.cuh"

namespace zero_inference::norms {

// `residual`, `sum`: null without a sum. offset, round_first: of rms_norm.
template <bool kLayer>
void call_forward(Call& call, const Tensor& x, const Tensor* residual, const Tensor& weight, const Tensor* bias, double eps,
                  double offset, bool round_first, Tensor& out, Tensor* sum) {
  const int64_t numel = call.rows * call.columns;
  const void* values = call.input("x", x, numel);
  const void* added = residual == nullptr ? nullptr : call.input("residual", *residual, numel);
  const void* weights = call.input("weight", weight, call.columns);
  const void* biases = bias == nullptr ? nullptr : call.input("bias", *bias, call.columns);
  call.with_type([&](auto zero) {
    using T = decltype(zero);
    NormForward<T> a = {};
    a.x = static_cast<const T*>(values);
    a.residual = static_cast<const T*>(added);
    a.weight = static_cast<const T*>(weights);
    a.bias = static_cast<const T*>(biases);
    a.out = static_cast<T*>(out.mutable_data_ptr());
    a.sum = sum == nullptr ? nullptr : static_cast<T*>(sum->mutable_data_ptr());
    a.rows = call.rows;
    a.columns = static_cast<int>(call.columns);
    a.eps = static_cast<float>(eps);
    a.offset = static_cast<float>(offset);
    a.round_first = round_first;
    norm_forward<T, kLayer>(a, call.device());
  });
}

// `grad_bias`: of layer_norm, else null.
template <bool kLayer>
void call_backward(Call& call, const Tensor& grad, const std::optional<Tensor>& grad_sum, const Tensor& x, const Tensor& weight,
                   double eps, double offset, Tensor& grad_x, Tensor& grad_weight, Tensor* grad_bias) {
  const int64_t numel = call.rows * call.columns;
  const void* grads = call.input("grad", grad, numel);
  const void* grad_sums = call.optional_input("grad_sum", grad_sum, numel);
  const void* values = call.input("x", x, numel);
  const void* weights = call.input("weight", weight, call.columns);
  call.with_type([&](auto zero) {
    using T = decltype(zero);
    NormBackward<T> a = {};
    a.grad = static_cast<const T*>(grads);
    a.grad_sum = static_cast<const T*>(grad_sums);
    a.x = static_cast<const T*>(values);
    a.weight = static_cast<const T*>(weights);
    a.grad_x = static_cast<T*>(grad_x.mutable_data_ptr());
    a.grad_weight = static_cast<T*>(grad_weight.mutable_data_ptr());
    a.grad_bias = grad_bias == nullptr ? nullptr : static_cast<T*>(grad_bias->mutable_data_ptr());
    a.rows = call.rows;
    a.columns = static_cast<int>(call.columns);
    a.eps = static_cast<float>(eps);
    a.offset = static_cast<float>(offset);
    norm_backward<T, kLayer>(a, call.device(), [&](int64_t count) { return call.scratch(count); });
  });
}

}  // namespace zero_inference::norms
