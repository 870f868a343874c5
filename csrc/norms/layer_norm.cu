// zero_inference::layer_norm, add_layer_norm and layer_norm_backward on CUDA; their schemas are in
// zero_inference/norms/ops.py.

#include "norm_call.cuh"

namespace {

using namespace zero_inference::norms;

Tensor layer_norm(const Tensor& x, const Tensor& weight, const Tensor& bias, double eps) {
  Call call("layer_norm", x);
  Tensor out = call.output_like(x);
  call_forward<true>(call, x, nullptr, weight, &bias, eps, 0, false, out, nullptr);
  return out;
}

std::tuple<Tensor, Tensor> add_layer_norm(const Tensor& x, const Tensor& residual, const Tensor& weight, const Tensor& bias,
                                          double eps) {
  Call call("add_layer_norm", x);
  Tensor out = call.output_like(x);
  Tensor sum = call.output_like(x);
  call_forward<true>(call, x, &residual, weight, &bias, eps, 0, false, out, &sum);
  return {out, sum};
}

std::tuple<Tensor, Tensor, Tensor> layer_norm_backward(const Tensor& grad, const std::optional<Tensor>& grad_sum,
                                                       const Tensor& x, const Tensor& weight, double eps) {
  Call call("layer_norm_backward", x);
  Tensor grad_x = call.output_like(x);
  Tensor grad_weight = call.output_like(weight);
  Tensor grad_bias = call.output_like(weight);
  call_backward<true>(call, grad, grad_sum, x, weight, eps, 0, grad_x, grad_weight, &grad_bias);
  return {grad_x, grad_weight, grad_bias};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(zero_inference, CUDA, library) {
  library.impl("layer_norm", TORCH_BOX(&layer_norm));
  library.impl("add_layer_norm", TORCH_BOX(&add_layer_norm));
  library.impl("layer_norm_backward", TORCH_BOX(&layer_norm_backward));
}
