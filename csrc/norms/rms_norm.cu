// zero_inference::rms_norm, add_rms_norm and rms_norm_backward on CUDA; their schemas are in zero_inference/norms/ops.py.

#include "norm_call.cuh"

namespace {

using namespace zero_inference::norms;

Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps, double weight_offset, bool round_first) {
  Call call("rms_norm", x);
  Tensor out = call.output_like(x);
  call_forward<false>(call, x, nullptr, weight, nullptr, eps, weight_offset, round_first, out, nullptr);
  return out;
}

std::tuple<Tensor, Tensor> add_rms_norm(const Tensor& x, const Tensor& residual, const Tensor& weight, double eps,
                                        double weight_offset, bool round_first) {
  Call call("add_rms_norm", x);
  Tensor out = call.output_like(x);
  Tensor sum = call.output_like(x);
  call_forward<false>(call, x, &residual, weight, nullptr, eps, weight_offset, round_first, out, &sum);
  return {out, sum};
}

std::tuple<Tensor, Tensor> rms_norm_backward(const Tensor& grad, const std::optional<Tensor>& grad_sum, const Tensor& x,
                                             const Tensor& weight, double eps, double weight_offset) {
  Call call("rms_norm_backward", x);
  Tensor grad_x = call.output_like(x);
  Tensor grad_weight = call.output_like(weight);
  call_backward<false>(call, grad, grad_sum, x, weight, eps, weight_offset, grad_x, grad_weight, nullptr);
  return {grad_x, grad_weight};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(zero_inference, CUDA, library) {
  library.impl("rms_norm", TORCH_BOX(&rms_norm));
  library.impl("add_rms_norm", TORCH_BOX(&add_rms_norm));
  library.impl("rms_norm_backward", TORCH_BOX(&rms_norm_backward));
}
