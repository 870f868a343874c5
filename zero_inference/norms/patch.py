"""Replace the norms of a loaded transformers model by our kernels, by a table of families.

Modules, parameters and hooks stay: only `forward` of the instances is replaced. So ZeRO-3 still gathers partitioned
parameters, the stream engine still moves whole layers, and `unpatch_norms` restores everything. If a decoder layer adds the residual right
before a norm, its forward is rewritten to pass both to the norm, which does both in one kernel.

Roundings are those of each family, so greedy tokens stay equal: Llama rounds the normalized value before it multiplies with the weight,
T5, Gemma (whose weights are stored less 1) and layer norm round once at the end.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from zero_inference.errors import RunError, UsageError
from zero_inference.kernels.extension import load_extension, why_unavailable
from zero_inference.norms import ops
from zero_inference.utils.patching import Patches

NO_DEVICE = "there is no CUDA device"
_STATE = "_zero_inference_norm_patches"


@dataclass(frozen=True)
class Norm:
    """Computation of a class of norm modules."""

    eps_attribute: str = "eps"
    is_layer_norm: bool = False  # otherwise it is an rms norm
    weight_offset: float = 0.0
    round_first: bool = False


@dataclass(frozen=True)
class Family:
    """Norm classes by name, and the norm of a decoder layer that follows the addition of the residual, if any."""

    norms: dict[str, Norm]
    layer_class: str = ""
    after_add: str = ""


LAYER_NORM = Norm(is_layer_norm=True)
LLAMA = Norm(eps_attribute="variance_epsilon", round_first=True)
T5 = Norm(eps_attribute="variance_epsilon")
GEMMA = Norm(weight_offset=1.0)


def _like_llama(name: str) -> Family:
    return Family({f"{name}RMSNorm": LLAMA}, f"{name}DecoderLayer", "post_attention_layernorm")


# By transformers' model_type. SmolLM and SmolLM2 are of type llama.
FAMILIES: dict[str, Family] = {
    "opt": Family({"LayerNorm": LAYER_NORM}),
    "bloom": Family({"LayerNorm": LAYER_NORM}),
    "gpt_neox": Family({"LayerNorm": LAYER_NORM}, "GPTNeoXLayer", "post_attention_layernorm"),
    **{name.lower(): _like_llama(name) for name in ("Llama", "Mistral", "Mixtral", "Qwen2", "Qwen3", "SmolLM3")},
    "qwen3_moe": _like_llama("Qwen3Moe"),
    "gpt_oss": Family({"GptOssRMSNorm": T5}, "GptOssDecoderLayer", "post_attention_layernorm"),
    "gemma": Family({"GemmaRMSNorm": GEMMA}, "GemmaDecoderLayer", "post_attention_layernorm"),
    "gemma2": Family({"Gemma2RMSNorm": GEMMA}, "Gemma2DecoderLayer", "pre_feedforward_layernorm"),
    "gemma3_text": Family({"Gemma3RMSNorm": GEMMA}, "Gemma3DecoderLayer", "pre_feedforward_layernorm"),
}


# --norm-kernels auto, cuda or off


def check_norm_kernels_option(asked: str, model_type: str) -> None:
    """Raise UsageError for `cuda` with a family that is not in the table, before anything is compiled or loaded."""
    if asked == "cuda" and (reason := family_refusal(model_type)):
        raise _refusal(reason)


def prepare_norm_kernels(asked: str, model_type: str, device: torch.device, say: Callable[[str], None]) -> str | None:
    """Compile or load the kernels. Return why they are not used, or None.

    Args:
        say: gets a line before a compilation that takes a minute.

    Raises:
        UsageError: `cuda` is set and not possible.
    """
    if asked == "off":
        return "--norm-kernels off"
    reason = family_refusal(model_type) if device.type == "cuda" else NO_DEVICE
    if reason is None and not load_extension(say):
        reason = f"the CUDA kernels are not there: {why_unavailable()}"
    if reason is not None and asked == "cuda":
        raise _refusal(reason)
    return reason


def apply_norm_kernels(
    asked: str, reason: str | None, model: nn.Module, say: Callable[[str], None], model_type: str | None = None
) -> dict[str, Any]:
    """Patch `model` unless there is a `reason` against it; return the record's fields about it.

    Args:
        model_type: as of `patch_norms`.

    Raises:
        RunError: `cuda` is set and this model has norms that are not in the table.
    """
    if reason is None:
        reason = patch_refusal(model, model_type)
        if reason is not None and asked == "cuda":
            raise _refusal(reason, RunError)
    if reason is None:
        return {"norm_modules_patched": patch_norms(model, model_type), "norm_kernels_unused_because": None}
    if reason != NO_DEVICE and asked == "auto":
        say(f"norms use transformers' implementation: {reason}")
    return {"norm_modules_patched": 0, "norm_kernels_unused_because": reason}


def _refusal(reason: str, kind: type[Exception] = UsageError) -> Exception:
    return kind(f"--norm-kernels cuda: {reason}; use auto or off.")


def patch_norms(model: nn.Module, model_type: str | None = None) -> int:
    """Replace the norms of a loaded transformers model, and additions before them, by ours; all of them or none.

    Args:
        model_type: the family, for a part of a model without a config, such as one decoder layer.

    Returns:
        the number of patched norm modules. 0 with a warning that gives the reason if the model is not patched.
    """
    if hasattr(model, _STATE):
        return sum(map(_is_norm, model.modules()))
    reason = patch_refusal(model, model_type)
    if reason is not None:
        warnings.warn(f"norms are left as they are: {reason}", stacklevel=2)
        return 0
    family = FAMILIES[model_type or model.config.model_type]
    patches, count = Patches(), 0
    for module in model.modules():
        name = type(module).__name__
        if name in family.norms:
            _set_forward(module, _norm_forward(family.norms[name]), patches)
            count += 1
        elif name == family.layer_class:
            forward = _fused_forward(type(module), family.after_add)  # type: ignore[arg-type]  # a class can be hashed
            if forward is not None:
                _set_forward(module, forward, patches)
    setattr(model, _STATE, patches)
    return count


def unpatch_norms(model: nn.Module) -> None:
    """Restore what `patch_norms` replaced, if anything."""
    if hasattr(model, _STATE):
        getattr(model, _STATE).close()
        delattr(model, _STATE)


def patch_refusal(model: nn.Module, model_type: str | None = None) -> str | None:
    """Return why `patch_norms` does not patch this model; None if it does. Arguments as there."""
    model_type = model_type or getattr(getattr(model, "config", None), "model_type", None)
    if reason := family_refusal(model_type):
        return reason
    norms = FAMILIES[model_type].norms
    found = [module for module in model.modules() if _is_norm(module)]
    for module in found:
        kind = type(module)
        if kind.__name__ not in norms or not kind.__module__.startswith(("transformers.models.", "torch.nn.")):
            return f"{model_type} with a {kind.__module__}.{kind.__name__} is not in the table of norms"
        if kind is nn.LayerNorm and (module.weight is None or module.bias is None or len(module.normalized_shape) != 1):
            return f"{model_type} has a LayerNorm without weight or bias, or over more than one dimension"
    return None if found else f"this {model_type} has no norm modules"


def family_refusal(model_type: str | None) -> str | None:
    """Return why no model of this family is patched; None if they are."""
    if model_type in FAMILIES:
        return None
    return f"the family {model_type} is not in the table of norms ({', '.join(FAMILIES)})"


def _is_norm(module: nn.Module) -> bool:
    return "Norm" in type(module).__name__ and not list(module.children())


def _set_forward(module: nn.Module, forward, patches: Patches) -> None:
    # accelerate's hook is the instance's `forward`, which calls the previous one as `_old_forward`
    attribute = "_old_forward" if hasattr(module, "_hf_hook") and hasattr(module, "_old_forward") else "forward"
    patches.set_attr(module, attribute, MethodType(forward, module))


@functools.cache
def _norm_forward(kind: Norm):
    """Return forward(self, hidden_states, residual=None) -> normalized, or with a residual (normalized sum, sum)."""

    def forward(self, hidden_states: Tensor, residual: Tensor | None = None):
        if hidden_states.dtype != self.weight.dtype:  # a norm in float32: dtypes mix as in the class's forward
            total = hidden_states if residual is None else hidden_states + residual
            normalized = type(self).forward(self, total)
            return normalized if residual is None else (normalized, total)
        eps = getattr(self, kind.eps_attribute)
        if kind.is_layer_norm:
            if residual is None:
                return ops.layer_norm(hidden_states, self.weight, self.bias, eps)
            return ops.fused_add_layer_norm(hidden_states, residual, self.weight, self.bias, eps)
        options: dict[str, Any] = dict(weight_offset=kind.weight_offset, round_first=kind.round_first)
        if residual is None:
            return ops.rms_norm(hidden_states, self.weight, eps, **options)
        return ops.fused_add_rms_norm(hidden_states, residual, self.weight, eps, **options)

    return forward


@functools.cache
def _fused_forward(layer_class: type[nn.Module], norm: str) -> Callable | None:
    """Return the class's forward with `sum = a + b` and the following `self.norm(sum)` in one call; None if it has none.

    Its source is rewritten, not replaced by a copy, because transformers changes layers from version to version. In training the class's
    forward runs, for gradient checkpointing.
    """
    own = layer_class.forward
    plain = inspect.unwrap(own)
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(plain)))
    except (OSError, TypeError, SyntaxError):
        return None
    definition = tree.body[0]
    if not isinstance(definition, ast.FunctionDef) or definition.decorator_list or plain.__closure__:
        return None
    blocks = [
        block
        for node in ast.walk(definition)
        for field in ("body", "orelse")
        if isinstance(block := getattr(node, field, None), list)
    ]
    if not any([_fuse_block(block, norm) for block in blocks]):  # noqa: C419 - every block, not only the first
        return None
    made: dict = {}
    code = compile(ast.fix_missing_locations(tree), f"<{layer_class.__qualname__} with fused norms>", "exec")
    exec(code, plain.__globals__, made)
    fused = made[definition.name]

    @functools.wraps(plain)
    def forward(self, *args, **kwargs):
        return (own if self.training else fused)(self, *args, **kwargs)

    return forward


def _fuse_block(block: list[ast.stmt], norm: str) -> bool:
    """Rewrite the first `sum = a + b` of a block with `self.norm(sum)` after it, with nothing but `alias = sum` in between."""
    for index, statement in enumerate(block):
        match statement:
            case ast.Assign(
                targets=[ast.Name(id=total)],
                value=ast.BinOp(left=ast.Name(id=left), op=ast.Add(), right=ast.Name(id=right)),
            ):
                for use, following in enumerate(block[index + 1 :], index + 1):
                    if not isinstance(following, ast.Assign):
                        break
                    if isinstance(following.value, ast.Name) and following.value.id == total:
                        continue  # an alias
                    source = ast.unparse(following)
                    if source.count(call := f"self.{norm}({total})") != 1:
                        break
                    block[index] = ast.parse(f"_normed, {total} = self.{norm}({left}, {right})").body[0]
                    block[use] = ast.parse(source.replace(call, "_normed")).body[0]
                    return True
    return False
