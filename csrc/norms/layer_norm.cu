// zero_inference::layer_norm, add_layer_norm and layer_norm_backward on CUDA; their schemas are in
// zero_inference/norms/ops.py.

#include "norm_call.cuh"

namespace zero_inference::norms {
namespace {

Tensor layer_norm(const Tensor& x, const Tensor& weight, const Tensor& bias, double eps) {
  return call_forward<true>(x, nullptr, weight, &bias, eps, 0, false, nullptr);
}

std::tuple<Tensor, Tensor> add_layer_norm(const Tensor& x, const Tensor& residual, const Tensor& weight, const Tensor& bias,
                                          double eps) {
  Tensor sum;
  Tensor out = call_forward<true>(x, &residual, weight, &bias, eps, 0, false, &sum);
  return {out, sum};
}

std::tuple<Tensor, Tensor, Tensor> layer_norm_backward(const Tensor& grad, const std::optional<Tensor>& grad_of_sum,
                                                       const Tensor& x, const Tensor& weight, double eps) {
  const std::vector<Tensor> grads = call_backward<true>(grad, grad_of_sum, x, weight, eps, 0);
  return {grads[0], grads[1], grads[2]};
}

STABLE_TORCH_LIBRARY_IMPL(zero_inference, CUDA, library) {
  library.impl("layer_norm", TORCH_BOX(&layer_norm));
  library.impl("add_layer_norm", TORCH_BOX(&add_layer_norm));
  library.impl("layer_norm_backward", TORCH_BOX(&layer_norm_backward));
}

}  // namespace
}  // namespace zero_inference::norms
