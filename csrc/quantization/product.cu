// zero_inference::linear_groups: a few tokens times a quantized weight, read in its stored format.
// zero_inference::linear_groups_indexed: pairs of a row of x and one of several weights; pairs of one weight share a block. The
// activation of an expert (`Form`, `Activation`) is applied to the float32 sums.
//
// Arguments of a weight are those of `operands` in zero_inference/kernels/quantization.py; `can_fuse` in products.py there says
// which formats these operators take.

#include <cmath>
#include <optional>

#include "product_task.cuh"

namespace zero_inference::quantization {
namespace {

using OptionalTensor = std::optional<Tensor>;

const void* checked(const char* name, const Tensor& tensor, ScalarType dtype, int64_t numel, const Tensor& x) {
  STD_TORCH_CHECK(tensor.is_cuda() && tensor.get_device_index() == x.get_device_index(), "linear_groups: ", name,
                  " must be on CUDA device ", x.get_device_index());
  STD_TORCH_CHECK(tensor.scalar_type() == dtype && tensor.numel() == numel && tensor.is_contiguous() &&
                      aligned(tensor.const_data_ptr(), kVectorBytes),
                  "linear_groups: ", name, " must be ", torch::headeronly::toString(dtype), ", contiguous, of ", numel,
                  " elements from an address of whole vectors of ", kVectorBytes, " bytes, found ",
                  torch::headeronly::toString(tensor.scalar_type()), " of ", tensor.numel());
  return tensor.const_data_ptr();
}

bool power_of_two_up_to(int64_t value, int64_t most) { return value > 0 && value <= most && (value & (value - 1)) == 0; }

// A weight as operators take it.
struct Operands {
  const Tensor& codes;
  const OptionalTensor &scale, &offset, &row_scale;
  int64_t kind, group_size, group_rows;
  bool divides;

  Codes codes_kind() const { return static_cast<Codes>(kind); }
  bool integers() const { return kind == kInt4 || kind == kInt8; }
  bool has_minima() const { return offset.has_value() && offset->scalar_type() != ScalarType::Byte; }
  bool is_scaled_by(ScalarType dtype) const { return scale.has_value() && scale->scalar_type() == dtype; }
  bool is_in_groups(int64_t least, int64_t most) const { return group_size >= least && power_of_two_up_to(group_size, most); }
  // Whether there is a kernel for x of `dtype`, and int4 has zero points of whole steps of a lane.
  bool can_multiply(ScalarType dtype) const {
    if (integers()) {
      const int64_t least = kind == kInt4 && !has_minima() ? 32 : 16;
      return is_scaled_by(dtype) && is_in_groups(least, kLargestGroup) && group_rows == 1 && !row_scale.has_value() &&
             (kind == kInt4 || has_minima() || !offset.has_value());
    }
    if (dtype != ScalarType::BFloat16 || offset.has_value()) return false;
    if (kind == kE2M1) {
      return group_rows == 1 && ((group_size == 32 && is_scaled_by(ScalarType::Float8_e8m0fnu)) ||
                                 (group_size == 16 && is_scaled_by(ScalarType::Float8_e4m3fn)));
    }
    return kind == kE4M3 && group_rows > 0 &&
           ((group_size == 0 && !scale.has_value()) || (is_in_groups(64, kLargestGroup) && is_scaled_by(ScalarType::Float)));
  }
};

Tensor launch_on(const Tensor& x, Task task, const Operands& weight, int64_t rows, int64_t columns) {
  const TensorDevice device(x);
  const int64_t sizes[] = {rows, columns};
  Tensor out = torch::stable::new_empty(x, sizes);
  if (out.numel() == 0) return out;
  task.out = out.mutable_data_ptr();
  const bool half = x.scalar_type() == ScalarType::Half;
  if (!weight.integers()) {
    multiply_floats(task, weight.codes_kind(), device);
  } else {
    (weight.has_minima() ? multiply_minima : multiply_zero_points)(task, weight.codes_kind(), half, device);
  }
  return out;
}

// A task of `weights` weights of `rows` rows, checked.
Task task_of(const Tensor& x, const Operands& weight, int64_t rows, int64_t weights) {
  const ScalarType dtype = x.scalar_type();
  STD_TORCH_CHECK(dtype == ScalarType::Half || dtype == ScalarType::BFloat16,
                  "linear_groups: x must be Half or BFloat16, found ", torch::headeronly::toString(dtype));
  STD_TORCH_CHECK(x.is_cuda() && x.dim() == 2, "linear_groups: x must be [tokens, columns] on a CUDA device");
  STD_TORCH_CHECK(weight.can_multiply(dtype), "linear_groups: no such format: codes ", weight.kind, ", group_size ",
                  weight.group_size, ", group_rows ", weight.group_rows, ", scales of ",
                  weight.scale.has_value() ? torch::headeronly::toString(weight.scale->scalar_type()) : "no dtype", ", x of ",
                  torch::headeronly::toString(dtype));
  const int64_t columns = x.size(1), bits = bits_of(weight.codes_kind());
  const bool whole = weight.kind == kE4M3 || columns % weight.group_size == 0;
  STD_TORCH_CHECK(rows >= 0 && (weights == 1 || rows % weight.group_rows == 0) && columns < (int64_t{1} << 30) && whole &&
                      columns * bits % 128 == 0,
                  "linear_groups: rows and columns must be whole groups and whole vectors of 16 bytes, found ", rows, " and ",
                  columns);
  const int64_t row_groups = weight.group_size > 0 ? divided_up(columns, weight.group_size) : 0;
  const int64_t groups = weights * divided_up(rows, weight.group_rows) * row_groups;
  Task task = {};
  task.x = checked("x", x, dtype, x.size(0) * columns, x);
  task.codes =
      static_cast<const uint8_t*>(checked("codes", weight.codes, ScalarType::Byte, weights * rows * columns * bits / 8, x));
  if (weight.scale.has_value()) task.scale = checked("scale", *weight.scale, weight.scale->scalar_type(), groups, x);
  if (weight.offset.has_value()) {
    task.offset = checked("offset", *weight.offset, weight.has_minima() ? dtype : ScalarType::Byte, groups, x);
  }
  if (weight.row_scale.has_value()) {
    const void* scales = checked("row_scale", *weight.row_scale, ScalarType::Float, weights * rows, x);
    task.row_scale = static_cast<const float*>(scales);
  }
  task.rows = rows;
  task.columns = static_cast<int>(columns);
  const int64_t group_size = weight.group_size > 0 ? weight.group_size : kLargestGroup;
  while (1 << task.group_shift < group_size) ++task.group_shift;
  task.row_groups = static_cast<int>(row_groups);
  task.group_rows = static_cast<int>(weight.group_rows);
  task.divides = weight.divides;
  return task;
}

// column_warps, splits, chunk_steps: 0 for the table of launch sizes.
Tensor linear_groups(const Tensor& x, const Tensor& codes, const OptionalTensor& scale, const OptionalTensor& offset,
                     const OptionalTensor& row_scale, int64_t codes_kind, int64_t group_size, int64_t group_rows, bool divides,
                     int64_t rows, const Tensor& bias, int64_t column_warps, int64_t splits, int64_t chunk_steps) {
  const Operands weight{codes, scale, offset, row_scale, codes_kind, group_size, group_rows, divides};
  Task task = task_of(x, weight, rows, 1);
  const int64_t tokens = x.size(0);
  STD_TORCH_CHECK(tokens <= kProductTokens, "linear_groups: ", kProductTokens, " tokens at most, found ", tokens);
  STD_TORCH_CHECK((column_warps == 0 || power_of_two_up_to(column_warps, kWarps)) &&
                      (splits == 0 || power_of_two_up_to(splits, kProductSplits)) &&
                      (chunk_steps == 0 || (chunk_steps >= kProductLeastChunk && power_of_two_up_to(chunk_steps, 64))),
                  "linear_groups: no such launch: column_warps ", column_warps, ", splits ", splits, ", chunk_steps ",
                  chunk_steps);
  task.bias =
      bias.numel() > 0 || rows == 0 ? checked("bias", bias, x.scalar_type(), rows, x) : nullptr;  // empty: there is none
  task.tokens = static_cast<int>(tokens);
  task.column_warps = static_cast<int>(column_warps);
  task.splits = static_cast<int>(splits);
  task.chunk_steps = static_cast<int>(chunk_steps);
  task.pairs = 1;

  return launch_on(x, task, weight, tokens, rows);
}

// x [tokens, columns]; tensors of a weight and bias of `weights` weights of `rows` rows, concatenated; slot int64 [pairs], as
// many for each row of x in order. limit: see `Task`, 0 for none. of_tokens: number of tokens of the pairs, none of which has a
// weight twice; 0: the rows of x.
Tensor linear_groups_indexed(const Tensor& x, const Tensor& codes, const OptionalTensor& scale, const OptionalTensor& offset,
                             const OptionalTensor& row_scale, int64_t codes_kind, int64_t group_size, int64_t group_rows,
                             bool divides, int64_t rows, const Tensor& slot, const OptionalTensor& bias, int64_t form,
                             int64_t activation, double limit, double up_offset, int64_t of_tokens) {
  const Operands weight{codes, scale, offset, row_scale, codes_kind, group_size, group_rows, divides};
  const int64_t bits = bits_of(weight.codes_kind());
  STD_TORCH_CHECK(rows > 0 && x.dim() == 2 && x.size(1) * bits >= 8,
                  "linear_groups_indexed: x and the weights must not be empty");
  const int64_t weights = codes.numel() / (rows * x.size(1) * bits / 8);
  Task task = task_of(x, weight, rows, weights);
  const int64_t tokens = x.size(0);
  const int64_t pairs = slot.numel();
  const bool halved = form >= kGateFirst;
  task.slot = static_cast<const int64_t*>(checked("slot", slot, ScalarType::Long, pairs, x));
  task.bias = bias.has_value() ? checked("bias", *bias, x.scalar_type(), weights * rows, x) : nullptr;
  const int64_t most = of_tokens > 0 ? of_tokens : std::max<int64_t>(1, tokens);  // pairs of one weight
  task.tokens = static_cast<int>(std::min<int64_t>(product_pairs(pairs, weights), most));
  task.pairs = static_cast<int>(pairs);
  task.pairs_of_row = static_cast<int>(pairs / std::max<int64_t>(1, tokens));
  task.weights = weights;
  task.form = static_cast<int>(form);
  task.activation = static_cast<int>(activation);
  task.limit = limit > 0 ? static_cast<float>(limit) : INFINITY;
  task.up_offset = static_cast<float>(up_offset);

  return launch_on(x, task, weight, pairs, halved ? rows / 2 : rows);
}

STABLE_TORCH_LIBRARY_IMPL(zero_inference, CUDA, library) {
  library.impl("linear_groups", TORCH_BOX(&linear_groups));
  library.impl("linear_groups_indexed", TORCH_BOX(&linear_groups_indexed));
}

}  // namespace
}  // namespace zero_inference::quantization
