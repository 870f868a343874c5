"""Parameters that only an engine may write: their bytes are stored elsewhere and copied for each pass, so a change would be lost."""

from __future__ import annotations

import copy
import sys
from typing import Any

import torch
from torch import nn

from zero_inference.errors import UsageError

ENGINES = ("zero_inference.", "deepspeed.", "accelerate.")  # modules whose code places weights
UNCHANGED = "change the checkpoint (or merge the adapter into it) and load that, or use engine='resident'"
# Names with one underscore at the end that change no values.
HARMLESS = {"requires_grad_", "rename_", "share_memory_", "detach_", "sparse_resize_", "sparse_resize_and_clear_"}
OPERATORS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift", "matmul")
WRITING = {name for name in dir(torch.Tensor) if name.endswith("_") and not name.startswith("_")} - HARMLESS
WRITING |= {"__setitem__", *(f"__i{name}__" for name in OPERATORS)}


def freeze(parameter: nn.Parameter) -> None:
    """Let only engines write `parameter`; other code that does gets a UsageError."""
    parameter.__class__ = FrozenParameter


class FrozenParameter(nn.Parameter):
    """A parameter whose values, in place or by `data`, only engines may write. Operators take it as any parameter."""

    # else each operator would call Python
    __torch_function__ = torch._C._disabled_torch_function_impl

    @property
    def data(self) -> torch.Tensor:
        values = torch.Tensor.data.__get__(self)
        if _caller_is_engine():
            return values
        if not values.numel():
            raise refusal("`data` of a parameter was read, which is fetched only for its pass")
        return values.as_subclass(_FrozenValues)

    @data.setter
    def data(self, values: torch.Tensor) -> None:
        if values is self:  # `Module.to` without a change
            return
        if not _caller_is_engine():
            raise refusal("`data` of a parameter was set")
        torch.Tensor.data.__set__(self, values)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """Return a plain parameter with the present values."""
        plain = torch.Tensor.data.__get__(self)
        memo[id(self)] = nn.Parameter(copy.deepcopy(plain), self.requires_grad)
        return memo[id(self)]


class _FrozenValues(torch.Tensor):
    """`data` of a frozen parameter, and views of it: reading works, writing raises UsageError."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        out = (kwargs or {}).get("out")
        if (name in WRITING and isinstance(args[0], _FrozenValues)) or isinstance(out, _FrozenValues):
            raise refusal(f"`{name}` on `data` of a parameter")
        result = super().__torch_function__(func, types, args, kwargs)
        if isinstance(result, _FrozenValues) and not _share_memory(result, args[0]):
            return result.as_subclass(torch.Tensor)
        return result


def refusal(what: str) -> UsageError:
    return UsageError(f"{what}: the engine has placed the weights, and they cannot be changed; {UNCHANGED}.")


def _share_memory(one: torch.Tensor, other: Any) -> bool:
    with torch._C.DisableTorchFunctionSubclass():
        return torch.is_tensor(other) and one.untyped_storage()._cdata == other.untyped_storage()._cdata


def _caller_is_engine() -> bool:
    """Return whether the caller of this property or method is an engine's code."""
    return sys._getframe(2).f_globals.get("__name__", "").startswith(ENGINES)


def _refusing(name: str) -> Any:
    own = getattr(torch.Tensor, name)

    def method(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if _caller_is_engine():
            return own(self, *args, **kwargs)
        raise refusal(f"`{name}` on a parameter")

    return method


for _name in WRITING:
    if hasattr(torch.Tensor, _name):
        setattr(FrozenParameter, _name, _refusing(_name))
