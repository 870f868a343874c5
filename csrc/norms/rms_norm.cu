// zero_inference::rms_norm, add_rms_norm and rms_norm_backward on CUDA; their schemas are in zero_inference/norms/ops.py.

#include "norm_backward.cuh"
#include "norm_forward.cuh"
#include "tensors.cuh"

namespace {

using namespace zero_inference::norms;

void forward(Call& call, const Tensor& x, const Tensor* residual, const Tensor& weight, double eps, double offset,
             bool round_first, Tensor& out, Tensor* sum) {
  const int64_t numel = call.rows * call.columns;
  const void* values = call.input("x", x, numel);
  const void* added = residual == nullptr ? nullptr : call.input("residual", *residual, numel);
  const void* weights = call.input("weight", weight, call.columns);
  call.with_type([&](auto zero) {
    using T = decltype(zero);
    NormForward<T> a = {};
    a.x = static_cast<const T*>(values);
    a.residual = static_cast<const T*>(added);
    a.weight = static_cast<const T*>(weights);
    a.out = static_cast<T*>(out.mutable_data_ptr());
    a.sum = sum == nullptr ? nullptr : static_cast<T*>(sum->mutable_data_ptr());
    a.rows = call.rows;
    a.columns = static_cast<int>(call.columns);
    a.eps = static_cast<float>(eps);
    a.offset = static_cast<float>(offset);
    a.round_first = round_first;
    norm_forward<T, false>(a, call.device());
  });
}

Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps, double weight_offset, bool round_first) {
  Call call("rms_norm", x);
  Tensor out = call.output_like(x);
  forward(call, x, nullptr, weight, eps, weight_offset, round_first, out, nullptr);
  return out;
}

std::tuple<Tensor, Tensor> add_rms_norm(const Tensor& x, const Tensor& residual, const Tensor& weight, double eps,
                                        double weight_offset, bool round_first) {
  Call call("add_rms_norm", x);
  Tensor out = call.output_like(x);
  Tensor sum = call.output_like(x);
  forward(call, x, &residual, weight, eps, weight_offset, round_first, out, &sum);
  return {out, sum};
}

std::tuple<Tensor, Tensor> rms_norm_backward(const Tensor& grad, const std::optional<Tensor>& grad_sum, const Tensor& x,
                                             const Tensor& weight, double eps, double weight_offset) {
  Call call("rms_norm_backward", x);
  const int64_t numel = call.rows * call.columns;
  const void* grads = call.input("grad", grad, numel);
  const void* grad_sums = call.optional_input("grad_sum", grad_sum, numel);
  const void* values = call.input("x", x, numel);
  const void* weights = call.input("weight", weight, call.columns);
  Tensor grad_x = call.output_like(x);
  Tensor grad_weight = call.output_like(weight);
  call.with_type([&](auto zero) {
    using T = decltype(zero);
    NormBackward<T> a = {};
    a.grad = static_cast<const T*>(grads);
    a.grad_sum = static_cast<const T*>(grad_sums);
    a.x = static_cast<const T*>(values);
    a.weight = static_cast<const T*>(weights);
    a.grad_x = static_cast<T*>(grad_x.mutable_data_ptr());
    a.grad_weight = static_cast<T*>(grad_weight.mutable_data_ptr());
    a.rows = call.rows;
    a.columns = static_cast<int>(call.columns);
    a.eps = static_cast<float>(eps);
    a.offset = static_cast<float>(weight_offset);
    norm_backward<T, false>(a, call.device(), [&](int64_t count) { return call.scratch(count); });
  });
  return {grad_x, grad_weight};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(zero_inference, CUDA, library) {
  library.impl("rms_norm", TORCH_BOX(&rms_norm));
  library.impl("add_rms_norm", TORCH_BOX(&add_rms_norm));
  library.impl("rms_norm_backward", TORCH_BOX(&rms_norm_backward));
}
