"""Files of a checkpoint folder: which hold weights or a tokenizer, and the tensors in them, read when they are needed."""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from zero_inference.errors import RunError, is_out_of_memory
from zero_inference.models.quantized import SCALE, BlockScales, dequantize_tensors
from zero_inference.utils.format import first_line

# The weights in one file, and the index that names their shards. If a checkpoint has both kinds, the first is used.
WEIGHT_FILES = (
    ("model.safetensors", "model.safetensors.index.json"),
    ("pytorch_model.bin", "pytorch_model.bin.index.json"),
)
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json", "vocab.txt", "spiece.model")


def checkpoint_files(folder: Path) -> list[Path]:
    """Return the weight files of a folder: safetensors before PyTorch's, one file before shards. Raises RunError if one is missing."""
    found = _find_weights(folder)
    if found.suffix != ".json":
        return [found]
    names = shard_names(found)
    if missing := [name for name in names if not (folder / name).is_file()]:
        raise RunError(
            f"{folder}: {found.name} names {shorten_names(missing)}, which is missing; fetch the checkpoint again."
        )
    return [folder / name for name in names]


def shard_names(index: Path) -> list[str]:
    """Return the names of the files that an index lists. Raises RunError if it is damaged or names a file outside its folder."""
    return sorted(set(_read_index(index).values()))


def _find_weights(folder: Path) -> Path:
    """Return the file with all weights, or the index of their shards."""
    for name in (name for names in WEIGHT_FILES for name in names):
        if (folder / name).is_file():
            return folder / name
    raise RunError(f"{folder}: has neither model.safetensors nor pytorch_model.bin, nor an index of them.")


def _read_index(index: Path) -> dict[str, str]:
    """Return the file name of each tensor's key."""
    try:
        found = json.loads(index.read_bytes())["weight_map"]
        names = set(found.values())
        if not names:
            raise ValueError("it names none")
    except OSError as error:
        raise RunError(f"{index}: cannot be read ({error.strerror}).") from error
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise RunError(
            f"{index}: damaged, or no index of weight files ({first_line(error)}); fetch it again."
        ) from error
    for name in names:
        # NAME_MAX of Linux
        if not isinstance(name, str) or {"/", ".."} & {*Path(name).parts} or len(name.encode(errors="replace")) > 255:
            raise RunError(f"{index}: names {str(name)[:100]!r}, which is not a file in its folder; fetch it again.")
    return found


def has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in TOKENIZERS)


def shorten_names(names: list[str], most: int = 3) -> str:
    """Return the first of `names`, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


class Shards:
    """The tensors of a checkpoint folder; float8 weights are dequantized to `dtype`.

    Attributes:
        file_of: the file of each tensor's key.
    """

    def __init__(self, folder: Path, fp8_blocks: BlockScales | None, dtype: Any):
        self.folder, self._blocks, self._dtype = folder, fp8_blocks, dtype
        self.file_of: dict[str, Path] = {}
        weights = _find_weights(folder)
        index = _read_index(weights) if weights.suffix == ".json" else {}
        for path in checkpoint_files(folder):
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
        paths = {key: self.file_of[key] for key in keys}
        with ExitStack() as files:
            readers = {path: _open(path, files) for path in dict.fromkeys(paths.values())}
            tensors = {key: readers[path][key]() for key, path in paths.items()}
            yield dequantize_tensors(tensors, self._blocks, self._dtype, self.folder)

    def with_scale(self, key: str) -> list[str]:
        """Return `key` and the key of its scales, those of them that the checkpoint has."""
        return [found for found in (key, key + SCALE) if found in self.file_of]

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
    import torch
    from safetensors import safe_open

    try:
        if path.suffix == ".safetensors":
            opened = files.enter_context(safe_open(path, framework="pt", device="cpu"))
            return {key: partial(opened.get_slice, key) for key in opened.keys()}
        # torch before 1.6 wrote another format, which cannot be mapped and is read as a whole
        state = torch.load(path, map_location="cpu", mmap=zipfile.is_zipfile(path), weights_only=True)
        if other := [str(key) for key, value in state.items() if not (isinstance(key, str) and torch.is_tensor(value))]:
            raise RunError(f"{path}: {shorten_names(other)} is not a named tensor; save the model's state_dict alone.")
        return {key: partial(state.get, key) for key in state}
    except RunError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        if isinstance(error, OSError) and error.strerror:
            raise RunError(f"{path}: cannot be read ({error.strerror}).") from error
        raise RunError(f"{path}: damaged or not a weight file ({first_line(error)}); fetch it again.") from error
