"""The norms as operators `torch.ops.zero_inference.*`: kernels on CUDA, the reference elsewhere, gradients, torch.compile.

A module a family (`rms`, `layer`, `poly`) holds its public functions and, for each operator, the schema, what runs without a kernel,
the shapes for tracing and the gradient. The schemas are here and not in the compiled library, so that operators are there without it.
The library (csrc/norms) adds kernels for CUDA; it is compiled at the first call with a CUDA tensor (`register`).

Shapes: x [..., D] with weights [D], in one dtype of float16, bfloat16 and float32, on one device; results are contiguous. Wrong ones
raise ValueError (`checks`).
"""

from zero_inference.norms.ops.layer import fused_add_layer_norm, layer_norm
from zero_inference.norms.ops.poly import fused_mul_grouped_poly_norm, fused_mul_poly_norm, poly_norm
from zero_inference.norms.ops.rms import fused_add_rms_norm, rms_norm

__all__ = [
    "fused_add_layer_norm",
    "fused_add_rms_norm",
    "fused_mul_grouped_poly_norm",
    "fused_mul_poly_norm",
    "layer_norm",
    "poly_norm",
    "rms_norm",
]
