"""ModuleGuard: a loaded model's modules and weights, compared before each call with those that the engine placed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from zero_inference.errors import UsageError
from zero_inference.models.frozen import FrozenParameter, freeze, refusal

MERGE_FIRST = (
    "merge the adapter into the plain model (merge_and_unload), save that, and load it, or use engine='resident'"
)
SUPPORTED_ADAPTERS = ("peft.tuners.lora.layer.Linear", "peft.tuners.lora.layer.Embedding")
OWN_HOOKS = ("transformers.", "zero_inference.")  # these change nothing that a module computes


class ModuleGuard:
    """Notices modules of a loaded model that were replaced, wrapped or hooked, and weights that were changed.

    Engines compute some blocks without calling the modules inside: on CPU workers, several products at once, or in CUDA graphs.

    Args:
        frozen: weights may not change.
        on_change: called with the modules inside which the engine has to call every module from now on.
        writable: parameters that may change even so.
    """

    def __init__(
        self,
        model: Any,
        frozen: bool,
        on_change: Callable[[set[torch.nn.Module]], None],
        writable: Sequence[torch.nn.Parameter] = (),
    ):
        modules = list(model.modules())
        self.on_change, self.known = on_change, set(modules)
        self.model, self.frozen = model, frozen
        self.children = [(m, m._modules, name, child) for m in modules for name, child in m._modules.items()]
        self.hooks = [
            (m, hooks, set(hooks))
            for m in modules
            for hooks in (m._forward_pre_hooks, m._forward_hooks)
            if m is not model
        ]
        self.reported: set[torch.nn.Module] = set()
        self.adapters: list[Any] = []
        self.parameters: list[tuple[dict[str, Any], str]] = []
        self.versions: dict[int, int] = {}  # by id; accelerate makes new parameters in each pass
        if frozen:
            free = set(map(id, writable))
            self.parameters = [
                (m._parameters, name)
                for m in modules
                for name, p in m._parameters.items()
                if p is not None and id(p) not in free
            ]
            placed = [dict.__getitem__(holder, name) for holder, name in self.parameters]  # DeepSpeed's [] fetches it
            for parameter in placed:
                freeze(parameter)
            self.versions = {id(parameter): parameter._version for parameter in placed}

    def check(self) -> None:
        """Report modules that were changed since the last call to the engine; called before each call.

        Raises:
            UsageError: weights were changed or replaced, or an adapter cannot be computed with them.
        """
        for holder, name in self.parameters:
            parameter = dict.get(holder, name)
            if type(parameter) is not FrozenParameter:
                raise refusal("a parameter was replaced")
            if not parameter.is_inference() and parameter._version != self.versions.get(id(parameter), 0):
                raise refusal("a parameter was changed in place")
        new = {m for m, children, name, child in self.children if children.get(name) is not child}
        new |= {m for m, hooks, own in self.hooks if len(hooks) != len(own) and _adds_to(hooks, own)}
        if self.frozen and not new <= self.reported:
            self.adapters = [
                m for m in self.model.modules() if m not in self.known and type(m).__module__.startswith("peft.")
            ]
        for adapter in self.adapters:
            _refuse_other_adapters(adapter)
        if not new <= self.reported:
            self.on_change(new)
            self.reported |= new


def _adds_to(hooks: dict[int, Any], own: set[int]) -> bool:
    """Return whether a hook that is not in `own` may change or observe what is computed."""
    return any(
        not (getattr(hook, "__module__", None) or "").startswith(OWN_HOOKS)
        for key, hook in hooks.items()
        if key not in own
    )


def _refuse_other_adapters(module: Any) -> None:
    """Raise UsageError for a module of PEFT that needs more of its base layer than its product."""
    kind = f"{type(module).__module__}.{type(module).__qualname__}"
    if hasattr(module, "base_layer"):
        variants = getattr(module, "lora_variant", None)
        if kind not in SUPPORTED_ADAPTERS or variants:
            what = f"{type(next(iter(variants.values()))).__name__}" if variants else kind.removeprefix("peft.tuners.")
            raise UsageError(
                f"adapter {what}: of PEFT, LoRA on linear modules and embeddings works here; {MERGE_FIRST}."
            )
        if any(p.is_meta for name, p in module.named_parameters() if not name.startswith("base_layer.")):
            raise UsageError(
                f"this adapter's weights were lost on the meta device, where accelerate has the model's: {MERGE_FIRST}."
            )
    elif hasattr(module, "original_module"):
        raise UsageError(
            f"this adapter replaces whole modules (modules_to_save), and their weights are the engine's: {MERGE_FIRST}."
        )
