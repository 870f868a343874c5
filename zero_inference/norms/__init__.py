"""Norms over the last dimension: CUDA kernels with a plain reference, modules, and their place in transformers models.

Nothing is imported before it is used: `import zero_inference.norms` needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_WHERE = {
    "ops": (
        "rms_norm",
        "fused_add_rms_norm",
        "layer_norm",
        "fused_add_layer_norm",
        "poly_norm",
        "fused_mul_poly_norm",
        "fused_mul_grouped_poly_norm",
    ),
    "reference": (
        "rms_norm_ref",
        "fused_add_rms_norm_ref",
        "layer_norm_ref",
        "fused_add_layer_norm_ref",
        "poly_norm_ref",
        "fused_mul_poly_norm_ref",
        "fused_mul_grouped_poly_norm_ref",
    ),
    "patch": ("patch_norms", "unpatch_norms"),
}
__all__ = [name for names in _WHERE.values() for name in names]


def __getattr__(name: str) -> Any:
    for module, names in _WHERE.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
