// zero_inference::rms_norm, add_rms_norm and rms_norm_backward on CUDA; their schemas are in zero_inference/norms/ops.py.

#include "norm_call.cuh"

namespace zero_inference::norms {
namespace {

Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps, double weight_offset, bool round_first) {
  return call_forward<false>(x, nullptr, weight, nullptr, eps, weight_offset, round_first, nullptr);
}

std::tuple<Tensor, Tensor> add_rms_norm(const Tensor& x, const Tensor& residual, const Tensor& weight, double eps,
                                        double weight_offset, bool round_first) {
  Tensor sum;
  Tensor out = call_forward<false>(x, &residual, weight, nullptr, eps, weight_offset, round_first, &sum);
  return {out, sum};
}

std::tuple<Tensor, Tensor> rms_norm_backward(const Tensor& grad, const std::optional<Tensor>& grad_of_sum, const Tensor& x,
                                             const Tensor& weight, double eps, double weight_offset) {
  const std::vector<Tensor> grads = call_backward<false>(grad, grad_of_sum, x, weight, eps, weight_offset);
  return {grads[0], grads[1]};
}

STABLE_TORCH_LIBRARY_IMPL(zero_inference, CUDA, library) {
  library.impl("rms_norm", TORCH_BOX(&rms_norm));
  library.impl("add_rms_norm", TORCH_BOX(&add_rms_norm));
  library.impl("rms_norm_backward", TORCH_BOX(&rms_norm_backward));
}

}  // namespace
}  // namespace zero_inference::norms
