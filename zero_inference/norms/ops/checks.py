"""What the operators refuse, in words that say what was found."""

from __future__ import annotations

import torch
from torch import Tensor

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def check(x: Tensor, weights: dict[str, Tensor], like_x: dict[str, Tensor]) -> None:
    """Raises ValueError unless `weights` have the shape of x's last dimension and `like_x` that of x, all of its dtype and device."""
    if x.dim() == 0 or x.shape[-1] == 0:
        raise ValueError(f"x must have a last dimension to normalize over, found shape {list(x.shape)}")
    if x.dtype not in DTYPES:
        raise ValueError(f"x must be float16, bfloat16 or float32, found {_short(x.dtype)} of shape {list(x.shape)}")
    for name, tensor in weights.items():
        if tensor.shape != x.shape[-1:]:
            raise ValueError(
                f"{name} must have shape {list(x.shape[-1:])} for x of shape {list(x.shape)}, "
                f"found {list(tensor.shape)}"
            )
    for name, tensor in like_x.items():
        if tensor.shape != x.shape:
            raise ValueError(f"{name} must have x's shape {list(x.shape)}, found {list(tensor.shape)}")
    for name, tensor in (weights | like_x).items():
        _check_kind(x, name, tensor)


def check_poly(x: Tensor, mul: Tensor | None, weight: Tensor, bias: Tensor, offsets: Tensor | None) -> None:
    """Raises ValueError for shapes, dtypes and devices of `poly_norm` and its kin; the values of offsets are not looked at."""
    check(x, {}, {} if mul is None else {"mul": mul})
    if offsets is None:
        shapes = ("weight", weight, [3]), ("bias", bias, [1])
        of = "found"
    else:
        if offsets.dim() != 1 or len(offsets) == 0 or offsets.dtype != torch.int32:
            raise ValueError(
                "offsets must be int32 of shape [experts], "
                f"found {_short(offsets.dtype)} of shape {list(offsets.shape)}"
            )
        if offsets.device != x.device:
            raise ValueError(f"offsets must be on x's device {x.device}, found {offsets.device}")
        shapes = ("weight", weight, [len(offsets), 3]), ("bias", bias, [len(offsets), 1])
        of = f"for offsets of shape {list(offsets.shape)}, found"
    for name, tensor, shape in shapes:
        if list(tensor.shape) != shape:
            raise ValueError(f"{name} must have shape {shape} {of} {list(tensor.shape)}")
        _check_kind(x, name, tensor)


def _check_kind(x: Tensor, name: str, tensor: Tensor) -> None:
    if tensor.dtype != x.dtype:
        raise ValueError(
            f"{name} must have x's dtype {_short(x.dtype)}, found {_short(tensor.dtype)} "
            f"(shapes {list(x.shape)} and {list(tensor.shape)})"
        )
    if tensor.device != x.device:
        raise ValueError(f"{name} must be on x's device {x.device}, found {tensor.device}")


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def check_offsets(offsets: Tensor | None) -> None:
    """Raises ValueError for ends that are negative or fall, on the host alone: a device would have to be waited for."""
    if offsets is None or offsets.is_cuda:
        return
    falls = torch.nonzero(offsets < torch.cat([offsets.new_zeros(1), offsets[:-1]]))
    if len(falls):
        at = int(falls[0])
        raise ValueError(
            f"offsets of shape {list(offsets.shape)} must not be negative or fall, found {int(offsets[at])} at expert {at} "
            f"behind {int(offsets[at - 1]) if at else 0}"
        )
