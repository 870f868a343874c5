"""Files of a checkpoint folder: which hold weights or a tokenizer, and the tensors in them, read when they are needed."""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from zero_inference.errors import RunError, UsageError, is_out_of_memory
from zero_inference.models.checkpoint_formats import INSTEAD, CheckpointFormat, StoredWeight
from zero_inference.models.checkpoint_formats.base import FP8, Parts, dtype_and_shape
from zero_inference.utils.format import first_line

# Names of dtypes in safetensors and in torch.
FLOAT_DTYPES = {"F64", "F32", "F16", "BF16", "float64", "float32", "float16", "bfloat16"}


QUANT_CONFIG = "hf_quant_config.json"  # ModelOpt's, beside config.json


def pop_quantization_config(config: Any, folder: Path | None) -> dict[str, Any] | None:
    """Remove the quantization config from a transformers config, which then describes the plain model, and return it.

    If it has none, that of ModelOpt in the checkpoint's `folder` is read. Raises RunError if that is damaged.
    """
    found = None
    for part in (config, config.get_text_config(decoder=True)):
        for name in ("quantization_config", "compression_config", "quantization"):
            value = getattr(part, name, None)
            value = value.to_dict() if hasattr(value, "to_dict") else value
            if value and isinstance(value, dict):
                found = found or value
                delattr(part, name)
    if found is None and folder is not None and (path := folder / QUANT_CONFIG).is_file():
        with _damage_as_run_error(path, "no quantization config"):
            found = json.loads(path.read_bytes())
            found["quantization"]["quant_algo"]  # a KeyError if it is another file
    if found and getattr(config, "expert_dtype", None):
        found = {"expert_dtype": config.expert_dtype} | found  # DeepSeek-V4 has it beside the quantization config
    return found


def integer_keys(tensors: dict[str, Any]) -> list[str]:
    """Return the keys of `Shards.open` that hold integers or booleans: masks and positions, never weights."""
    plain = {key: tensor for key, tensor in tensors.items() if not isinstance(tensor, StoredWeight)}
    return [key for key, tensor in plain.items() if dtype_and_shape(tensor)[0] not in FLOAT_DTYPES]


# The weights in one file, or the index that names their shards. If a checkpoint has several, the first is used.
WEIGHT_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json", "vocab.txt", "spiece.model")


def find_shards(folder: Path) -> tuple[list[Path], dict[str, str]]:
    """Return the weight files of a folder, safetensors before PyTorch's, one file before shards; and the index of shards, key -> file.

    Raises RunError if one is missing, or the index is damaged or names a file outside its folder.
    """
    found = next((folder / name for name in WEIGHT_FILES if (folder / name).is_file()), None)
    if found is None:
        raise RunError(f"{folder}: has neither model.safetensors nor pytorch_model.bin, nor an index of them.")
    if found.suffix != ".json":
        return [found], {}
    index = read_index(found)
    names = sorted(set(index.values()))
    if missing := [name for name in names if not (folder / name).is_file()]:
        raise RunError(
            f"{folder}: {found.name} names {shorten_names(missing)}, which is missing; fetch the checkpoint again."
        )
    return [folder / name for name in names], index


def read_index(index: Path) -> dict[str, str]:
    with _damage_as_run_error(index, "no index of weight files"):
        found = json.loads(index.read_bytes())["weight_map"]
        names = set(found.values())
        if not names:
            raise ValueError("it names none")
    for name in names:
        # NAME_MAX of Linux
        if not isinstance(name, str) or {"/", ".."} & {*Path(name).parts} or len(name.encode(errors="replace")) > 255:
            raise RunError(f"{index}: names {str(name)[:100]!r}, which is not a file in its folder; fetch it again.")
    return found


def has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in TOKENIZERS)


def shorten_names(names: list[str]) -> str:
    """Return the first three of `names`, and how many more there are."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


@contextmanager
def errors_as(kind: type[Exception], problem: str, remedy: str = ".") -> Iterator[None]:
    """Turn exceptions of a library's or a checkpoint's code into `kind`, except out of memory and our own errors."""
    try:
        yield
    except (UsageError, RunError):
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise kind(f"{problem} ({first_line(error)}){remedy}") from error


@contextmanager
def _damage_as_run_error(path: Path, what: str) -> Iterator[None]:
    with errors_as(RunError, f"{path}: damaged, or {what}", "; fetch it again."):
        try:
            yield
        except OSError as error:
            if error.strerror:
                raise RunError(f"{path}: cannot be read ({error.strerror}).") from error
            raise


class Shards:
    """The tensors of a checkpoint folder, by the keys of the weights: those of one that is quantized are one `StoredWeight`.

    Args:
        format: of the quantized weights; None where there are none.
        dtype: of the values of quantized weights.
    """

    def __init__(self, folder: Path, format: CheckpointFormat | None, dtype: torch.dtype):
        self.folder, self.format, self.dtype = folder, format, dtype
        file_of: dict[str, Path] = {}
        paths, index = find_shards(folder)
        for path in paths:
            with ExitStack() as files:
                for key in _open(path, files):
                    listed = folder / index[key] if key in index else None
                    if key in file_of and listed not in (path, file_of[key]):
                        raise RunError(
                            f"{folder}: {key} is in {file_of[key].name} and in {path.name}, and no index says "
                            "which one to use; fetch the checkpoint again."
                        )
                    if key not in file_of or listed == path:
                        file_of[key] = path
        self._file_of = file_of
        # weight -> part -> key of quantized weights
        self.quantized = {} if format is None else format.group_keys(file_of)
        parts = {key for keys in self.quantized.values() for key in keys.values()}
        ignored = () if format is None else format.ignored
        plain = (key for key in file_of if key not in parts and not key.endswith(ignored))
        self.keys = dict.fromkeys((*plain, *self.quantized))  # of weights and all other tensors

    def _tensor_keys(self, key: str) -> list[str]:
        return [*self.quantized[key].values()] if key in self.quantized else [key]

    @contextmanager
    def open(self, keys: list[str]) -> Iterator[dict[str, Any]]:
        """Yield key -> tensor, read when it is indexed. Files are closed afterwards: mapped pages count as memory of the process.

        Raises RunError for a quantized weight whose tensors do not fit each other, or that is of another format than the checkpoint.
        """
        with ExitStack() as files:
            paths = dict.fromkeys(self._file_of[each] for key in keys for each in self._tensor_keys(key))
            readers = {path: _open(path, files) for path in paths}
            found: dict[str, Any] = {}
            for key in keys:
                tensors = {each: readers[self._file_of[each]][each]() for each in self._tensor_keys(key)}
                found[key] = self._stored(key, tensors) if key in self.quantized else self._plain(key, tensors[key])
            yield found

    def _stored(self, key: str, tensors: dict[str, Any]) -> StoredWeight:
        assert self.format is not None
        keys = self.quantized[key]
        by_part = {part: tensors[each] for part, each in keys.items()}
        parts = Parts(self.folder, key, self.format.part_keys(key) | keys, by_part)
        return replace(self.format.weight(parts), dtype=self.dtype)

    def _plain(self, key: str, tensor: Any) -> Any:
        dtype = dtype_and_shape(tensor)[0]
        if dtype in FLOAT_DTYPES or not (key.endswith("weight") or "F8" in dtype or "float8" in dtype):
            return tensor
        missing = self.format.part_keys(key).get("scales") if self.format is not None else None
        if missing is not None and dtype in FP8:
            raise RunError(f"{self.folder}: {key} is stored as {dtype} and has no {missing}; fetch it again.")
        raise RunError(f"{self.folder}: {key} is stored as {dtype}, quantized in an unsupported format; {INSTEAD}.")

    def layers(self) -> list[list[str]]:
        """Return all keys, grouped by the first number in them, which is the layer's; keys without a number come first."""
        groups: dict[int, list[str]] = {}
        for key in self.keys:
            number = re.search(r"(?:^|\.)(\d+)\.", key)
            groups.setdefault(int(number.group(1)) if number else -1, []).append(key)
        return [groups[number] for number in sorted(groups)]

    def check_complete(self, keys: list[str]) -> None:
        """Raise RunError for a truncated file: reading it through a memory map would end the process with a bus error."""
        for path in {self._file_of[each] for key in keys for each in self._tensor_keys(key)}:
            if path.suffix == ".safetensors":
                ranges = _byte_ranges(path).values()
                if path.stat().st_size < max((offset + nbytes for offset, nbytes in ranges), default=0):
                    raise RunError(f"{path}: the file is cut short; fetch it again.")

    def byte_ranges(self, keys: Collection[str]) -> dict[str, tuple[Path, int, int]]:
        """Return file, offset and bytes of the tensors `keys`, as they are stored; nothing for files other than safetensors."""
        paths = {path for key in keys if (path := self._file_of[key]).suffix == ".safetensors"}
        ranges = {path: _byte_ranges(path) for path in paths}
        return {key: (path, *ranges[path][key]) for key in keys if (path := self._file_of[key]) in paths}


def _byte_ranges(path: Path) -> dict[str, tuple[int, int]]:
    """Return key -> (offset, bytes) of the tensors of a safetensors file."""
    with open(path, "rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(header_bytes))
    offsets = {key: entry["data_offsets"] for key, entry in header.items() if key != "__metadata__"}
    return {key: (8 + header_bytes + begin, end - begin) for key, (begin, end) in offsets.items()}


def _open(path: Path, files: ExitStack) -> dict[str, Callable[[], Any]]:
    """Return key -> function that returns its tensor, valid while `files` is open."""
    from safetensors import safe_open

    with _damage_as_run_error(path, "not a weight file"):
        if path.suffix == ".safetensors":
            try:
                opened = files.enter_context(safe_open(path, framework="pt", device="cpu"))
            except RuntimeError as error:
                # PyTorch maps files private and writable, which Linux refuses if they are larger than memory and swap
                if not is_out_of_memory(error):
                    raise
                opened = files.enter_context(safe_open(path, framework="pt", device="cpu", backend="pread"))
            return {key: partial(opened.get_slice, key) for key in opened.keys()}
        # torch before 1.6 wrote another format, which cannot be mapped and is read as a whole
        state = torch.load(path, map_location="cpu", mmap=zipfile.is_zipfile(path), weights_only=True)
        if other := [str(key) for key, value in state.items() if not (isinstance(key, str) and torch.is_tensor(value))]:
            raise RunError(f"{path}: {shorten_names(other)} is not a named tensor; save the model's state_dict alone.")
        return {key: partial(state.get, key) for key in state}
