"""Which files of a checkpoint folder hold what."""

from __future__ import annotations

import json
import os
from pathlib import Path

from zero_inference.errors import RunError
from zero_inference.utils.format import first_line

# The weights in one file, and the index that names their shards. Where a checkpoint has both kinds, the first is taken.
WEIGHT_FILES = (
    ("model.safetensors", "model.safetensors.index.json"),
    ("pytorch_model.bin", "pytorch_model.bin.index.json"),
)
LONGEST_NAME = 255  # bytes, on Linux
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json", "vocab.txt", "spiece.model")


def checkpoint_files(folder: Path) -> list[Path]:
    """The weight files of a checkpoint folder: safetensors where there are any, else PyTorch's; one file before many.

    Raises:
        RunError: there are none, or the index is damaged or names one that is not there.
    """
    found = _weights(folder)
    if not found.name.endswith(".index.json"):
        return [found]
    names = shards(found)
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise RunError(f"{folder}: {found.name} names {few(missing)}, which is missing; fetch the checkpoint again.")
    return [folder / name for name in names]


def indexed(folder: Path) -> dict[str, Path]:
    """Key of each tensor -> the file that the folder's index places it in; empty where one file holds all. Raises as `shards`."""
    found = _weights(folder)
    return (
        {key: folder / name for key, name in _weight_map(found).items()} if found.name.endswith(".index.json") else {}
    )


def shards(index: Path) -> list[str]:
    """Names of the files that an index lists. Raises RunError where it is damaged or names a file outside its folder."""
    return sorted(set(_weight_map(index).values()))


def _weights(folder: Path) -> Path:
    for names in WEIGHT_FILES:
        for name in names:
            if (folder / name).is_file():
                return folder / name
    raise RunError(f"{folder}: has neither model.safetensors nor pytorch_model.bin, nor an index of them.")


def _weight_map(index: Path) -> dict[str, str]:
    try:
        found = json.loads(index.read_bytes())["weight_map"]
        names = set(found.values())
    except OSError as error:
        raise RunError(f"{index}: cannot be read ({error.strerror}).") from error
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise RunError(
            f"{index}: damaged, or no index of weight files ({first_line(error)}); fetch it again."
        ) from error
    if not names:
        raise RunError(f"{index}: damaged, or no index of weight files (it names none); fetch it again.")
    for name in names:
        inside = isinstance(name, str) and not os.path.isabs(name) and ".." not in Path(name).parts
        if not inside or len(name.encode(errors="replace")) > LONGEST_NAME:
            raise RunError(f"{index}: names {str(name)[:100]!r}, which is not a file in its folder; fetch it again.")
    return found


def has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in TOKENIZERS)


def few(names: list[str], most: int = 3) -> str:
    """The first of `names`, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
