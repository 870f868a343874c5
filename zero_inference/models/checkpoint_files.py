"""Files of a checkpoint folder: which hold weights or a tokenizer, and the tensors in them, read when they are needed."""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from zero_inference.errors import RunError, UsageError, is_out_of_memory
from zero_inference.utils.format import first_line

SCALE_SUFFIX = "_scale_inv"  # suffix of the weight's key
INSTEAD = "use the checkpoint in bfloat16 or float16 (--quant-bits 8 or 4 stores it smaller)"
# Names of dtypes in safetensors and in torch.
FLOAT_DTYPES = {"F64", "F32", "F16", "BF16", "float64", "float32", "float16", "bfloat16"}
SCALE_DTYPES = FLOAT_DTYPES | {"F8_E8M0", "float8_e8m0fnu"}
FLOAT8_DTYPES = {"F8_E4M3", "float8_e4m3fn"}
# By code, in float32: a look-up is twice as fast on a core as torch's conversion (0.57 and 0.28 G values/s).
FLOAT8_VALUES = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
# Values of a `quantization_config` with quant_method fp8 that are read; the first is the default.
FP8 = {"activation_scheme": ("dynamic",), "expert_dtype": ("fp8",), "fmt": ("e4m3", "float8_e4m3", "float8_e4m3fn")}


class BlockScales(NamedTuple):
    """Rows and columns of the blocks of a float8 matrix that share a scale; blocks at its edges may be smaller."""

    rows: int
    columns: int


def pop_quantization_config(config: Any) -> dict[str, Any] | None:
    """Remove the quantization config from a transformers config, which then describes the plain model, and return it."""
    found = None
    for part in (config, config.get_text_config(decoder=True)):
        for name in ("quantization_config", "compression_config", "quantization"):
            value = getattr(part, name, None)
            value = value.to_dict() if hasattr(value, "to_dict") else value
            if value and isinstance(value, dict):
                found = found or value
                delattr(part, name)
    return found


def read_block_scales(name: str, quantization: dict[str, Any]) -> BlockScales:
    """Return the block size of checkpoint `name` by its quantization config. Raises UsageError for another format."""
    bitsandbytes = "bitsandbytes" if "load_in_8bit" in quantization else None
    method = quantization.get("quant_method") or bitsandbytes or "its config.json names no method"
    size = quantization.get("weight_block_size", (128, 128))
    unread = []
    if method != "fp8":
        unread.append((method, "fp8 with block scales"))
    for key, readable in FP8.items():
        if (quantization.get(key) or readable[0]) not in readable:
            unread.append((f"fp8 with {key} {quantization[key]!r}", repr(readable[0])))
    if not isinstance(size, list | tuple) or [type(side) for side in size] != [int, int] or min(size) < 1:
        unread.append((f"fp8 with weight_block_size {size!r}", "blocks of [rows, columns]"))
    if unread:
        found, expected = unread[0]
        raise UsageError(
            f"--model {name}: its weights are quantized ({found}), and only {expected} is read; {INSTEAD}."
        )
    return BlockScales(*size)


def dequantize_tensors(
    tensors: dict[str, Any], blocks: BlockScales | None, dtype: torch.dtype, folder: Any
) -> dict[str, Any]:
    """Return `tensors` (torch's or safetensors slices) with float8 weights that become `dtype` when indexed, and without their scales.

    Raises RunError if a weight is no plain float and has no scale, a scale has no float8 weight, or it has another shape.
    """
    plain = {}
    for key, tensor in tensors.items():
        stored, shape = _dtype_and_shape(tensor)
        if blocks and key.endswith(SCALE_SUFFIX):
            weight = key.removesuffix(SCALE_SUFFIX)
            found = _dtype_and_shape(tensors[weight])[0] if weight in tensors else "not in the checkpoint"
            if found not in FLOAT8_DTYPES:
                raise RunError(
                    f"{folder}: {key} scales {weight}, a float8 weight, but that is {found}; fetch it again."
                )
        elif blocks and stored in FLOAT8_DTYPES:
            if key + SCALE_SUFFIX not in tensors:
                raise RunError(f"{folder}: {key} is stored as {stored} and has no {key}{SCALE_SUFFIX}; fetch it again.")
            scales = tensors[key + SCALE_SUFFIX]
            scale_dtype, scale_shape = _dtype_and_shape(scales)
            counts = (-(-size // side) for size, side in zip(shape[-2:], blocks))  # of blocks
            expected = [*shape[:-2], *counts] if len(shape) > 1 else None
            if scale_shape != expected or scale_dtype not in SCALE_DTYPES:
                raise RunError(
                    f"{folder}: {key}{SCALE_SUFFIX} is {scale_dtype} of shape {scale_shape}, and {key} of shape {shape} in "
                    f"blocks of {blocks.rows} x {blocks.columns} needs floats of shape {expected}."
                )
            plain[key] = _Dequantized(tensor, scales, blocks, dtype, shape)
        elif stored not in FLOAT_DTYPES and (key.endswith("weight") or "F8" in stored or "float8" in stored):
            raise RunError(f"{folder}: {key} is stored as {stored}, quantized in an unsupported format; {INSTEAD}.")
        else:
            plain[key] = tensor
    return plain


def integer_keys(tensors: dict[str, Any]) -> list[str]:
    """Return the keys of the `dequantize_tensors` that hold integers or booleans: masks and positions, never weights."""
    plain = {key: tensor for key, tensor in tensors.items() if not isinstance(tensor, _Dequantized)}
    return [key for key, tensor in plain.items() if _dtype_and_shape(tensor)[0] not in FLOAT_DTYPES]


def _dtype_and_shape(tensor: Any) -> tuple[str, list[int]]:
    if torch.is_tensor(tensor):
        return str(tensor.dtype).removeprefix("torch."), list(tensor.shape)
    return tensor.get_dtype(), list(tensor.get_shape())


class _Dequantized:
    """A float8 weight [..., out, in] with its scales; indexing it reads them and returns values in `dtype`."""

    def __init__(self, weight: Any, scales: Any, blocks: BlockScales, dtype: torch.dtype, shape: list[int]):
        self.weight, self.scales, self.blocks, self.dtype, self.shape = weight, scales, blocks, dtype, shape

    def __getitem__(self, index: Any) -> torch.Tensor:
        """Multiply in float32, one row of blocks at a time, so that only this is in memory beside the result."""
        scales = self.scales[...].float()
        values = torch.empty(self.shape, dtype=self.dtype)
        for number, start in enumerate(range(0, self.shape[-2], self.blocks.rows)):
            rows = slice(start, start + self.blocks.rows)
            by_column = scales[..., number, :].repeat_interleave(self.blocks.columns, -1)[..., None, : self.shape[-1]]
            values[..., rows, :] = FLOAT8_VALUES.take(self.weight[..., rows, :].view(torch.uint8).long()) * by_column
        return values[index]


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
    """The tensors of a checkpoint folder; float8 weights are dequantized to `dtype`."""

    def __init__(self, folder: Path, fp8_blocks: BlockScales | None, dtype: Any):
        self.folder, self._blocks, self._dtype = folder, fp8_blocks, dtype
        self.file_of: dict[str, Path] = {}  # by key
        paths, index = find_shards(folder)
        for path in paths:
            with ExitStack() as files:
                for key in _open(path, files):
                    listed = folder / index[key] if key in index else None
                    if key in self.file_of and listed not in (path, self.file_of[key]):
                        raise RunError(
                            f"{folder}: {key} is in {self.file_of[key].name} and in {path.name}, and no index says "
                            "which one to use; fetch the checkpoint again."
                        )
                    if key not in self.file_of or listed == path:
                        self.file_of[key] = path

    @contextmanager
    def open(self, keys: list[str]) -> Iterator[dict[str, Any]]:
        """Yield key -> tensor, read when it is indexed. Files are closed afterwards: mapped pages count as memory of the process."""
        with ExitStack() as files:
            readers = {path: _open(path, files) for path in dict.fromkeys(self.file_of[key] for key in keys)}
            tensors = {key: readers[self.file_of[key]][key]() for key in keys}
            yield dequantize_tensors(tensors, self._blocks, self._dtype, self.folder)

    def with_scale(self, key: str) -> list[str]:
        """Return `key` and the key of its scales, those of them that the checkpoint has."""
        return [found for found in (key, key + SCALE_SUFFIX) if found in self.file_of]

    def layers(self) -> list[list[str]]:
        """Return all keys, grouped by the first number in them, which is the layer's; keys without a number come first."""
        groups: dict[int, list[str]] = {}
        for key in self.file_of:
            number = re.search(r"(?:^|\.)(\d+)\.", key)
            groups.setdefault(int(number.group(1)) if number else -1, []).append(key)
        return [groups[number] for number in sorted(groups)]

    def check_complete(self, keys: list[str]) -> None:
        """Raise RunError for a truncated file: reading it through a memory map would end the process with a bus error."""
        for path in {self.file_of[key] for key in keys}:
            if path.suffix == ".safetensors":
                with open(path, "rb") as file:
                    header_bytes = int.from_bytes(file.read(8), "little")
                    header = json.loads(file.read(header_bytes))
                ends = [entry["data_offsets"][1] for key, entry in header.items() if key != "__metadata__"]
                if path.stat().st_size < 8 + header_bytes + max(ends, default=0):
                    raise RunError(f"{path}: the file is cut short; fetch it again.")


def _open(path: Path, files: ExitStack) -> dict[str, Callable[[], Any]]:
    """Return key -> function that returns its tensor, valid while `files` is open."""
    from safetensors import safe_open

    with _damage_as_run_error(path, "not a weight file"):
        if path.suffix == ".safetensors":
            opened = files.enter_context(safe_open(path, framework="pt", device="cpu"))
            return {key: partial(opened.get_slice, key) for key in opened.keys()}
        # torch before 1.6 wrote another format, which cannot be mapped and is read as a whole
        state = torch.load(path, map_location="cpu", mmap=zipfile.is_zipfile(path), weights_only=True)
        if other := [str(key) for key, value in state.items() if not (isinstance(key, str) and torch.is_tensor(value))]:
            raise RunError(f"{path}: {shorten_names(other)} is not a named tensor; save the model's state_dict alone.")
        return {key: partial(state.get, key) for key in state}
