"""Norms over the last dimension: CUDA kernels with a plain reference, modules, and their place in transformers models.

Nothing is imported before it is used: `import zero_inference.norms` needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_NORMS = (
    "rms_norm",
    "fused_add_rms_norm",
    "layer_norm",
    "fused_add_layer_norm",
    "poly_norm",
    "fused_mul_poly_norm",
    "fused_mul_grouped_poly_norm",
)
_OPS = [*_NORMS, *(f"{name}_ref" for name in _NORMS)]
_WHERE = dict.fromkeys(_OPS, "ops") | {"patch_norms": "patch", "unpatch_norms": "patch"}
__all__ = list(_WHERE)


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_WHERE[name]}"), name)
