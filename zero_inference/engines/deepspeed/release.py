"""What DeepSpeed keeps of a model when its engine is gone: what it put on the modules, which holds the engine, and variables of its own,
which hold the model for as long as the process lives. With any of them all weights in host memory stay."""

from __future__ import annotations

import functools

import torch


class Additions:
    """What DeepSpeed puts on the modules of `model` between the making of this and `note`."""

    def __init__(self, model: torch.nn.Module):
        self.before = {module: set(vars(module)) for module in model.modules()}
        self.added: dict[torch.nn.Module, set[str]] = {}

    def note(self) -> None:
        self.added = {module: set(vars(module)) - names for module, names in self.before.items()}

    def remove(self) -> None:
        """Take it all off, and have DeepSpeed forget the model, which cannot be called any more then. After `engine.destroy`."""
        for module in self.before:
            module._parameters = vars(module).get("_original_parameters", module._parameters)
            for hooks in (module._forward_hooks, module._forward_pre_hooks):
                hooks.clear()
            for name in self.added.get(module, ()):
                vars(module).pop(name, None)
        _forget_modules(set(map(id, self.before)))
        self.before, self.added = {}, {}


def _forget_modules(ids: set[int]) -> None:
    from deepspeed.runtime.zero import parameter_offload
    from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator

    # The model at its bottom, and above it the modules that an error or a signal ended in.
    stack = parameter_offload.FWD_MODULE_STACK
    stack[:] = [module for module in stack if id(module) not in ids]
    for method in vars(PartitionedParameterCoordinator).values():
        _forget_results(method)


def _forget_results(method) -> None:
    """Clear what a method has of functools.lru_cache, which holds all that it was called with; a decorator may be around it."""
    cells = [cell.cell_contents for cell in getattr(method, "__closure__", None) or ()]
    for function in (method, *cells):
        if isinstance(function, functools._lru_cache_wrapper):
            function.cache_clear()
