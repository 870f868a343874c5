"""Our norms in a loaded transformers model, by a table of families.

A patched norm keeps its module, its parameters and its hooks: only `forward` of the instance is another one, and `extra_repr`,
so that `print(model)` shows it. So ZeRO-3 still gathers what it partitioned, the stream engine still moves whole layers, and
`unpatch_norms` leaves no trace. Where a decoder
layer adds the residual right before a norm, its forward is rewritten to hand both to the norm, which does both in one kernel.

Roundings follow each family, so that greedy tokens stay: Llama and its kin round the normalized value before they multiply with
the weight, Gemma (whose weights are stored less 1) and layer norm round once at the end.
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

from torch import Tensor, nn

from zero_inference.norms import ops

_STATE = "_zero_inference_norm_patches"


@dataclass(frozen=True)
class Norm:
    """How one class of norm modules computes; `eps` names its attribute, `layer` is layer norm instead of rms norm."""

    eps: str = "eps"
    layer: bool = False
    weight_offset: float = 0.0
    round_first: bool = False

    @property
    def operator(self) -> str:
        """As PyTorch and its profiler know it."""
        return f"zero_inference::{'layer_norm' if self.layer else 'rms_norm'}"


@dataclass(frozen=True)
class Family:
    """Norm classes by name, and which norm of a decoder layer follows on the addition of the residual (None: none does)."""

    norms: dict[str, Norm]
    layer_class: str | None = None
    after_add: str | None = None


LAYER = Norm(layer=True)
LLAMA = Norm(eps="variance_epsilon", round_first=True)
GEMMA = Norm(weight_offset=1.0)


def _like_llama(name: str) -> Family:
    return Family({f"{name}RMSNorm": LLAMA}, f"{name}DecoderLayer", "post_attention_layernorm")


# By transformers' model_type. SmolLM and SmolLM2 are of type llama.
FAMILIES: dict[str, Family] = {
    "opt": Family({"LayerNorm": LAYER}),
    "bloom": Family({"LayerNorm": LAYER}),
    "gpt_neox": Family({"LayerNorm": LAYER}, "GPTNeoXLayer", "post_attention_layernorm"),
    "llama": _like_llama("Llama"),
    "mistral": _like_llama("Mistral"),
    "mixtral": _like_llama("Mixtral"),
    "qwen2": _like_llama("Qwen2"),
    "qwen3": _like_llama("Qwen3"),
    "qwen3_moe": _like_llama("Qwen3Moe"),
    "smollm3": _like_llama("SmolLM3"),
    "gemma": Family({"GemmaRMSNorm": GEMMA}, "GemmaDecoderLayer", "post_attention_layernorm"),
    "gemma2": Family({"Gemma2RMSNorm": GEMMA}, "Gemma2DecoderLayer", "pre_feedforward_layernorm"),
    "gemma3_text": Family({"Gemma3RMSNorm": GEMMA}, "Gemma3DecoderLayer", "pre_feedforward_layernorm"),
}


def patch_norms(model: nn.Module, model_type: str | None = None) -> int:
    """Replace the norms of a loaded transformers model, and additions before them, by ours; all of them or none.

    Args:
        model_type: the family of a part of a model, such as one decoder layer, which has no config of its own to say it.

    Returns:
        How many norm modules are patched now. 0 for a model that is left alone, with a warning that says why.
    """
    if hasattr(model, _STATE):
        return len({module for module, *_ in getattr(model, _STATE) if _is_norm(module)})
    reason = patch_refusal(model, model_type)
    if reason is not None:
        warnings.warn(f"norms are left as they are: {reason}", stacklevel=2)
        return 0
    family = FAMILIES[model_type or model.config.model_type]
    patches: list[tuple[nn.Module, str, object]] = []
    count = 0
    for module in model.modules():
        name = type(module).__name__
        if name in family.norms:
            _set_forward(module, _norm_forward(family.norms[name]), patches)
            _set(module, "extra_repr", _norm_repr(family.norms[name]), patches)
            count += 1
        elif name == family.layer_class:
            forward = _fused_forward(type(module), family.after_add)  # type: ignore[arg-type]  # a class can be hashed
            if forward is not None:
                _set_forward(module, forward, patches)
    setattr(model, _STATE, patches)
    return count


def unpatch_norms(model: nn.Module) -> None:
    """Put back what `patch_norms` replaced; nothing happens to a model that is not patched."""
    for module, attribute, before in reversed(getattr(model, _STATE, [])):
        if before is None:
            delattr(module, attribute)
        else:
            setattr(module, attribute, before)
    if hasattr(model, _STATE):
        delattr(model, _STATE)


def patch_refusal(model: nn.Module, model_type: str | None = None) -> str | None:
    """Why `patch_norms` would leave this model alone, in a few words; None if it would not. Arguments as there."""
    model_type = model_type or getattr(getattr(model, "config", None), "model_type", None)
    reason = family_refusal(model_type)
    if reason is not None:
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
    """The same for a whole family."""
    return (
        None
        if model_type in FAMILIES
        else f"the family {model_type} is not in the table of norms ({', '.join(FAMILIES)})"
    )


def _is_norm(module: nn.Module) -> bool:
    return "Norm" in type(module).__name__ and not list(module.children())


def _set_forward(module: nn.Module, forward, patches: list) -> None:
    # accelerate's hook is an own `forward` of the module, which calls what was there as `_old_forward`
    attribute = "_old_forward" if hasattr(module, "_hf_hook") and hasattr(module, "_old_forward") else "forward"
    _set(module, attribute, forward, patches)


def _set(module: nn.Module, attribute: str, function, patches: list) -> None:
    """Make `function` a method of this instance alone; `patches` learns what was there."""
    patches.append((module, attribute, module.__dict__.get(attribute)))
    setattr(module, attribute, MethodType(function, module))


@functools.cache
def _norm_repr(kind: Norm):
    """extra_repr(self): the class's own, and the operator that computes now."""

    def extra_repr(self) -> str:
        return ", ".join(filter(None, (type(self).extra_repr(self), f"kernel={kind.operator}")))

    return extra_repr


@functools.cache
def _norm_forward(kind: Norm):
    """forward(self, hidden_states, residual=None) -> normalized, or with a residual (normalized sum, sum)."""

    def forward(self, hidden_states: Tensor, residual: Tensor | None = None):
        if hidden_states.dtype != self.weight.dtype:  # a norm kept in float32: its own forward mixes dtypes as it likes
            total = hidden_states if residual is None else hidden_states + residual
            normalized = type(self).forward(self, total)
            return normalized if residual is None else (normalized, total)
        eps = getattr(self, kind.eps)
        if kind.layer:
            if residual is None:
                return ops.layer_norm(hidden_states, self.weight, self.bias, eps)
            return ops.fused_add_layer_norm(hidden_states, residual, self.weight, self.bias, eps)
        offset, round_first = kind.weight_offset, kind.round_first
        if residual is None:
            return ops.rms_norm(hidden_states, self.weight, eps, weight_offset=offset, round_first=round_first)
        return ops.fused_add_rms_norm(
            hidden_states, residual, self.weight, eps, weight_offset=offset, round_first=round_first
        )

    return forward


@functools.cache
def _fused_forward(layer_class: type[nn.Module], norm: str) -> Callable | None:
    """The class's forward with `sum = a + b` and the `self.norm(sum)` behind it in one call; None if it has no such place.

    transformers writes the layers of a family out in full and changes them from version to version, so the code that is there
    is rewritten, and not replaced by a copy that would grow old. In training the class's own forward runs, which knows
    gradient checkpointing.
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
    if not any([_fuse_block(block, norm) for block in blocks]):  # noqa: C419 - every block, also behind the first
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
    """Rewrite the first `sum = a + b` of a block that only names stand between it and a use of `self.norm(sum)`."""
    for index, statement in enumerate(block):
        match statement:
            case ast.Assign(
                targets=[ast.Name(id=total)],
                value=ast.BinOp(left=ast.Name(id=left), op=ast.Add(), right=ast.Name(id=right)),
            ):
                behind = index + 1
                while behind < len(block) and _is_alias(block[behind], total):
                    behind += 1
                calls = (
                    [node for node in ast.walk(block[behind]) if _is_call(node, norm, total)]
                    if behind < len(block)
                    else []
                )
                if len(calls) == 1 and isinstance(block[behind], ast.Assign):
                    block[index] = ast.parse(f"_normed, {total} = self.{norm}({left}, {right})").body[0]
                    block[behind] = _Replace(calls[0]).visit(block[behind])
                    return True
    return False


def _is_alias(statement: ast.stmt, name: str) -> bool:
    return isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Name) and statement.value.id == name


def _is_call(node: ast.AST, norm: str, argument: str) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node) == f"self.{norm}({argument})"


class _Replace(ast.NodeTransformer):
    def __init__(self, call: ast.AST):
        self.call = call

    def visit_Call(self, node: ast.Call):
        return ast.Name(id="_normed", ctx=ast.Load()) if node is self.call else self.generic_visit(node)
