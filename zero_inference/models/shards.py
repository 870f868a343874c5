"""The tensors of a checkpoint folder: which file holds which, opened for as long as they are read."""

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
from zero_inference.models.files import checkpoint_files, few, indexed
from zero_inference.models.quantized import SCALE, plain_tensors
from zero_inference.models.spec import ModelSpec
from zero_inference.utils.format import first_line


class Shards:
    """The tensors of the checkpoint that `spec` names.

    Attributes:
        folder: where it is.
        where: key of each tensor -> its file.

    Raises:
        RunError: a file is missing or damaged, or two hold the same tensor.
    """

    def __init__(self, spec: ModelSpec):
        self.folder, self._blocks, self._dtype = spec.checkpoint_folder(), spec.fp8_blocks, spec.dtype
        self.where: dict[str, Path] = {}
        places = indexed(self.folder)
        for path in checkpoint_files(self.folder):
            with ExitStack() as files:
                for key in _open(path, files):
                    if key in self.where and places.get(key) not in (path, self.where[key]):
                        raise RunError(
                            f"{self.folder}: {key} is in {self.where[key].name} and in {path.name}, and no index says "
                            "which one to use; fetch the checkpoint again."
                        )
                    if key not in self.where or places[key] == path:
                        self.where[key] = path

    @contextmanager
    def opened(self, keys: list[str]) -> Iterator[dict[str, Any]]:
        """Key -> tensor that is read when it is indexed, float8 weights as the run's dtype.

        Files are closed behind it, because pages of a mapped file count as memory of the process.
        """
        paths = {key: self.where[key] for key in keys}
        with ExitStack() as files:
            opened = {path: _open(path, files) for path in dict.fromkeys(paths.values())}
            tensors = {key: opened[path][key]() for key, path in paths.items()}
            yield plain_tensors(tensors, self._blocks, self._dtype, self.folder)

    def with_scale(self, key: str) -> list[str]:
        """`key` and that of its scales, where the checkpoint has any."""
        return [found for found in (key, key + SCALE) if found in self.where]

    def layers(self) -> list[list[str]]:
        """All keys, split by the first number in them, which is the layer's; what has none comes first."""
        groups: dict[int, list[str]] = {}
        for key in self.where:
            number = re.search(r"(?:^|\.)(\d+)\.", key)
            groups.setdefault(int(number.group(1)) if number else -1, []).append(key)
        return [groups[number] for number in sorted(groups)]

    def check_readable(self, keys: list[str]) -> None:
        """A file cut short is an error here rather than a bus error in a memory-mapped read."""
        for path in {self.where[key] for key in keys}:
            if path.suffix == ".safetensors":
                with open(path, "rb") as file:
                    header = int.from_bytes(file.read(8), "little")
                    last = max(
                        (
                            entry["data_offsets"][1]
                            for key, entry in json.loads(file.read(header)).items()
                            if key != "__metadata__"
                        ),
                        default=0,
                    )
                if path.stat().st_size < 8 + header + last:
                    raise RunError(f"{path}: the file is cut short; fetch it again.")


def _open(path: Path, files: ExitStack) -> dict[str, Callable[[], Any]]:
    """Key -> what gives its tensor, as long as `files` is open."""
    import torch
    from safetensors import safe_open

    try:
        if path.suffix == ".safetensors":
            opened = files.enter_context(safe_open(path, framework="pt", device="cpu"))
            return {key: partial(opened.get_slice, key) for key in opened.keys()}
        # torch before 1.6 wrote another format, which cannot be mapped and is read as a whole
        state = torch.load(path, map_location="cpu", mmap=zipfile.is_zipfile(path), weights_only=True)
        if other := [str(key) for key, value in state.items() if not (isinstance(key, str) and torch.is_tensor(value))]:
            raise RunError(f"{path}: {few(other)} is not a named tensor; save the model's state_dict alone.")
        return {key: partial(state.get, key) for key in state}
    except RunError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        if isinstance(error, OSError) and error.strerror:
            raise RunError(f"{path}: cannot be read ({error.strerror}).") from error
        raise RunError(f"{path}: damaged or not a weight file ({first_line(error)}); fetch it again.") from error
