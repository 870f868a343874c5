"""The base class of readers of quantized checkpoints, and the tensors of one weight as they see them.

A weight W of the model, [..., N, K] (out, in), is stored as several tensors: codes, and what turns them into values. A `CheckpointFormat`
knows them by the ends of their keys, checks them by their headers before any is read, and returns a `StoredWeight`.
"""

from __future__ import annotations

import fnmatch
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zero_inference.errors import RunError, UsageError
from zero_inference.kernels.formats import QuantizedWeight, WeightFormat, dequantize_reference

INSTEAD = "use the checkpoint in bfloat16 or float16 (--quant-bits 8 or 4 stores it smaller)"
# Names of dtypes in safetensors, and in torch for .bin files.
FLOATS = ("F16", "BF16", "F32", "float16", "bfloat16", "float32")
FP8 = ("F8_E4M3", "float8_e4m3fn")
E8M0 = ("F8_E8M0", "float8_e8m0fnu")
BYTES = ("U8", "uint8")
WORDS = ("I32", "int32")


def dtype_and_shape(tensor: Any) -> tuple[str, tuple[int, ...]]:
    """Return the dtype's name and the shape of a torch tensor or a safetensors slice."""
    if torch.is_tensor(tensor):
        return str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
    return tensor.get_dtype(), tuple(tensor.get_shape())


def float_dtype(tensor: Any) -> torch.dtype:
    """Return the dtype of a tensor of one of `FLOATS`."""
    of_safetensors = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}
    return tensor.dtype if torch.is_tensor(tensor) else of_safetensors[tensor.get_dtype()]


@dataclass(frozen=True)
class Part:
    """One tensor of a stored weight, read when it is called."""

    tensor: Any
    shape: tuple[int, ...]

    def __call__(self) -> Tensor:
        return self.tensor[...]


@dataclass(frozen=True)
class Parts:
    """The tensors that a checkpoint has for the weight `key`.

    Attributes:
        keys: their keys by part, such as "codes" and "scales"; those that are missing have the keys that they would have.
        tensors: the tensors that there are, by part.
    """

    folder: Path
    key: str
    keys: Mapping[str, str]
    tensors: Mapping[str, Any]

    def __contains__(self, part: str) -> bool:
        return part in self.tensors

    def take(self, part: str, dtypes: Collection[str], *shapes: Sequence[int | None]) -> Part:
        """Return a part after checking that it has one of `dtypes` and one of `shapes` (None is any size; no shapes: any shape).

        Raises RunError if it is missing, or of another dtype or shape.
        """
        key = self.keys[part]
        if part not in self.tensors:
            raise RunError(
                f"{self.folder}: {key} is missing, which {next(self.keys[each] for each in self.tensors)} belongs to; fetch the "
                "checkpoint again."
            )
        dtype, shape = dtype_and_shape(self.tensors[part])
        fits = [
            len(shape) == len(each) and all(size in (None, found) for found, size in zip(shape, each))
            for each in shapes
        ]
        if dtype not in dtypes or (shapes and not any(fits)):
            # the first half of the names are those of safetensors
            names = " or ".join([*dtypes][: -(-len(dtypes) // 2)])
            expected = " or ".join(str(list(each)).replace("None", "*") for each in shapes)
            raise RunError(
                f"{self.folder}: {key} is {dtype} of shape {list(shape)}, and must be {names}"
                f"{f' of shape {expected}' if expected else ''}; fetch config.json and the weights again, of one revision."
            )
        return Part(self.tensors[part], shape)


@dataclass(frozen=True)
class StoredWeight:
    """A weight of a quantized checkpoint; indexing it returns its values in `dtype`, as the model has them.

    Attributes:
        shape: [..., N, K].
        read: returns its tensors.
        transposed: the model has [..., K, N].
        column_order: int64 [K]: column k of the codes is column column_order[k] of the weight; None: they are in order.
        in_files: the checkpoint's key of each tensor of `QuantizedWeight` that it stores byte for byte.
    """

    shape: tuple[int, ...]
    format: WeightFormat
    read: Callable[[], QuantizedWeight]
    transposed: bool = False
    column_order: Tensor | None = None
    in_files: Mapping[str, str] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32

    def __getitem__(self, index: Any) -> Tensor:
        values = torch.empty(self.shape, dtype=self.dtype)
        dequantize_reference(self.read(), values)
        if self.column_order is not None:
            values = values[..., self.column_order.argsort()]
        return (values.mT.contiguous() if self.transposed else values)[index]


@dataclass(frozen=True)
class CheckpointFormat(ABC):
    """The format of a quantized checkpoint, by its quantization config. Subclasses name their options and raise UsageError for others.

    Attributes:
        name: for messages and records, such as "MXFP4" or "int4 (GPTQ)".
    """

    name: str
    # end of a key -> part; the rest of the key is the weight's. "" is a weight whose codes have its own key.
    ends: Mapping[str, str] = field(default_factory=dict, repr=False)
    ignored: tuple[str, ...] = ()  # ends of keys that only quantized activations and KV caches need
    suffix: str = ""  # of the weight's key, where `ends` replace it
    bits: int = 4  # of a code, in most weights
    group_size: int = -1  # columns that share a scale, in most weights; -1 for whole rows
    skipped: tuple[str, ...] = ()  # names of modules that are not quantized, or patterns of them

    @abstractmethod
    def weight(self, parts: Parts) -> StoredWeight:
        """Return the weight of `parts`, which are not read yet. Raises RunError if they do not fit each other."""

    @abstractmethod
    def format_of(self, module: str, shape: tuple[int, ...], dtype: torch.dtype) -> WeightFormat | None:
        """Return the format of a weight [..., N, K] of `module` by the config; None if it is not quantized, or for no such shape.

        Args:
            dtype: of the model as it is published, which scales of integers are taken to have.
        """

    def skips(self, module: str) -> bool:
        """Return whether the config leaves out `module`: by a name, or a part of one between dots; by a regular expression after "re:";
        or by a pattern with "*"."""
        for pattern in self.skipped:
            if pattern.startswith("re:"):
                found = bool(re.match(pattern[3:], module))
            elif "*" in pattern:
                found = fnmatch.fnmatchcase(module, pattern) or fnmatch.fnmatchcase(module, f"{pattern}.*")
            else:
                found = f".{pattern}." in f".{module}."
            if found:
                return True
        return False

    def group_keys(self, keys: Iterable[str]) -> dict[str, dict[str, str]]:
        """Return weight -> part -> key of the quantized weights among `keys`."""
        found: dict[str, dict[str, str]] = {}
        known = set(keys)
        by_length = sorted((end for end in self.ends if end), key=len, reverse=True)
        for key in keys:
            end = next((each for each in by_length if key.endswith(each)), None)
            if end is not None:
                found.setdefault(key.removesuffix(end) + self.suffix, {})[self.ends[end]] = key
        for weight, parts in [*found.items()]:
            if "" in self.ends and weight in known:
                parts.setdefault(self.ends[""], weight)
            elif "codes" not in parts and not weight.endswith("weight"):
                del found[weight]  # another parameter with such a name
        return found

    def part_keys(self, weight: str) -> dict[str, str]:
        """Return the key of each part that weight may have; of several ends of a part the first."""
        stem = weight.removesuffix(self.suffix) if self.suffix else weight
        found: dict[str, str] = {}
        for end, part in self.ends.items():
            found.setdefault(part, stem + end)
        return found


def refuse(model: str, found: str, expected: str) -> UsageError:
    """Return the error for a checkpoint whose format is not read."""
    return UsageError(
        f"--model {model}: its weights are quantized ({found}), which is not read: {expected}; {INSTEAD}."
    )


def skipped_modules(config: Mapping[str, Any], *names: str) -> tuple[str, ...]:
    """Return the modules that a quantization config leaves out under any of the keys `names`."""
    return tuple(str(each) for name in names for each in config.get(name) or ())
