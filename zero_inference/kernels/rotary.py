"""Rotary embedding of queries and keys in one kernel, if that gives the bits of the model's own function.

transformers' attention calls `apply_rotary_pos_emb` of its own file, some ten PyTorch kernels. While a model with our kernel is loaded, a
`_Rotary` replaces that name. It calls the original for long passes, with gradients, and for other models of the family.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from zero_inference.kernels.extension import operator_library
from zero_inference.utils.patching import Patches, SharedPatch

NAME = "apply_rotary_pos_emb"
MAX_TOKENS = 4096  # in a pass; with more, matrix products dominate
TRIAL_HEAD_DIM = 64


class Form(NamedTuple):
    """Form of a model's rotation by cos and sin [batch, tokens, width]."""

    times: int  # the first `times * width` elements of a head are rotated
    in_order: bool  # results are contiguous, as after torch.cat; otherwise they have the strides of q and k


class Forms(NamedTuple):
    """Forms of a function by the width of cos and sin; None where the kernel differs in any bit."""

    head_wide: Form | None
    half_wide: Form | None
    narrower: Form | None


LIBRARY = operator_library(__name__)
LIBRARY.define(
    "rotary_embedding(Tensor q, Tensor k, Tensor cos, Tensor sin, int rotated, Tensor(a!) q_out, Tensor(b!) k_out) -> ()"
)


def _reference(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, rotated: int, q_out: Tensor, k_out: Tensor) -> None:
    """Write q and k [batch, heads, tokens, head_dim] to `q_out` and `k_out`, with the first `rotated` elements of each head rotated by cos
    and sin [batch, tokens, `rotated` or half of it]."""
    cos, sin = (torch.cat((each,) * (rotated // each.shape[-1]), -1).unsqueeze(1) for each in (cos, sin))
    for x, out in ((q, q_out), (k, k_out)):
        head = x[..., :rotated]
        first, second = head.chunk(2, -1)
        out[..., :rotated] = head * cos + torch.cat((-second, first), -1) * sin
        out[..., rotated:] = x[..., rotated:]


LIBRARY.impl("rotary_embedding", _reference, "CompositeExplicitAutograd")


def rotary_kernel(model: nn.Module, device: torch.device, dtype: torch.dtype) -> Patches:
    """Let `model` use the kernel on `device` in `dtype` until the result is closed, if a trial there agrees with its own function."""
    patches = Patches()
    for file in (sys.modules[name] for name in {type(module).__module__ for module in model.modules()}):
        found = vars(file).get(NAME)
        own = found.before if isinstance(found, _Rotary) else found
        if callable(own) and any(forms := supported_forms(own, device, dtype)):
            rotary = patches.share_item(vars(file), NAME, _Rotary)
            rotary.forms[torch.empty(0, device=device).device, dtype] = forms  # the device with its index
    return patches


class _Rotary(SharedPatch):
    """Calls the kernel, or the original function if the kernel does not support a call."""

    def __init__(self, before: Callable):
        functools.update_wrapper(self, before)
        super().__init__(before)
        self.forms: dict[tuple[torch.device, torch.dtype], Forms] = {}

    def __call__(self, *args: Any, **options: Any) -> Any:
        if len(args) == 4 and not options and not torch.compiler.is_compiling():
            q, k, cos, sin = args
            form = self._form(q, k, cos, sin)
            if form is not None:
                return rotate(q, k, cos, sin, form)
        return self.before(*args, **options)

    def _form(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Form | None:
        """Return the form of this call, or None if the kernel does not support it."""
        tensors = q, k, cos, sin
        forms = self.forms.get((q.device, q.dtype))
        if forms is None or q.dim() != 4 or k.dim() != 4 or cos.dim() != 3 or cos.shape != sin.shape:
            return None
        batch, _, tokens, head_dim = q.shape
        width = cos.shape[2]
        fits = (
            (k.shape[0], *k.shape[2:]) == (batch, tokens, head_dim)
            and cos.shape[0] in (1, batch)
            and cos.shape[1] == tokens
            and 0 < batch * tokens <= MAX_TOKENS
            and 0 < width <= head_dim
            and all(x.dtype == q.dtype and x.device == q.device and x.stride(-1) == 1 for x in tensors)
            and not (torch.is_grad_enabled() and any(x.requires_grad for x in tensors))
        )
        form = forms.head_wide if width == head_dim else forms.half_wide if 2 * width == head_dim else forms.narrower
        return form if fits and form and form.times * width <= head_dim and form.times * width % 2 == 0 else None


def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, form: Form) -> tuple[Tensor, Tensor]:
    """Return q [batch, heads, tokens, head_dim] and k rotated by cos and sin [batch or 1, tokens, width]."""
    outs = [x.new_empty(x.shape) if form.in_order else torch.empty_like(x) for x in (q, k)]
    torch.ops.zero_inference.rotary_embedding(q, k, cos, sin, form.times * cos.shape[-1], *outs)
    return outs[0], outs[1]


@functools.lru_cache(maxsize=64)
@torch.no_grad()
def supported_forms(own: Callable, device: torch.device, dtype: torch.dtype) -> Forms:
    """Find the forms of function `own` by trials on random numbers."""
    head_dim = TRIAL_HEAD_DIM
    forms = [Form(*each) for each in itertools.product((1, 2), (False, True))]

    def form_of(width: int) -> Form | None:
        fitting = (form for form in forms if width * form.times <= head_dim)
        return next((form for form in fitting if _agrees(own, width, form, device, dtype)), None)

    return Forms(form_of(head_dim), form_of(head_dim // 2), form_of(head_dim // 4))


def _agrees(own: Callable, width: int, form: Form, device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether the model's `own` function and the kernel give the same bits and strides for random inputs."""
    draw = torch.Generator().manual_seed(width)
    batch, tokens = 2, 3
    q, k = (
        torch.randn(batch, tokens, heads, TRIAL_HEAD_DIM, generator=draw).to(device, dtype).transpose(1, 2)
        for heads in (4, 2)
    )
    cos, sin = (torch.randn(batch, tokens, width, generator=draw).to(device, dtype) for _ in range(2))
    try:
        pairs = list(zip(own(q, k, cos, sin), rotate(q, k, cos, sin, form), strict=True))
    except Exception:  # the model's own code may raise anything
        return False
    return all(
        torch.is_tensor(one) and one.dtype == other.dtype and torch.equal(one, other) and one.stride() == other.stride()
        for one, other in pairs
    )
