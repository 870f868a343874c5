"""Which files of a checkpoint folder hold what."""

from __future__ import annotations

import json
from pathlib import Path

from zero_inference.errors import RunError
from zero_inference.text import first_line

# The weights in one file, and the index that names their shards. Where a checkpoint has both kinds, the first is taken.
WEIGHT_FILES = (("model.safetensors", "model.safetensors.index.json"), ("pytorch_model.bin", "pytorch_model.bin.index.json"))
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json", "vocab.txt", "spiece.model")


def checkpoint_files(folder: Path) -> list[Path]:
    """The weight files of a checkpoint folder: safetensors where there are any, else PyTorch's.

    Raises:
        RunError: there are none, or the index names one that is not there.
    """
    for single, index in WEIGHT_FILES:
        if (folder / index).is_file():
            names = shards(folder / index)
            missing = [name for name in names if not (folder / name).is_file()]
            if missing:
                raise RunError(f"{folder}: {index} names {few(missing)}, which is not there; fetch the checkpoint again.")
            return [folder / name for name in names]
        if (folder / single).is_file():
            return [folder / single]
    raise RunError(f"{folder}: neither model.safetensors nor pytorch_model.bin (or their index) is there.")


def shards(index: Path) -> list[str]:
    """Names of the files that an index lists.

    Raises:
        RunError: it is damaged, or names files of other folders.
    """
    try:
        names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
        outside = [name for name in names if Path(name).is_absolute() or ".." in Path(name).parts]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise RunError(f"{index}: damaged, no index of weights ({first_line(error)}); fetch the checkpoint again.") from error
    if outside or not names:
        what = f"{few(outside)}, outside of its folder" if outside else "no file"
        raise RunError(f"{index}: it names {what}; fetch the checkpoint from whoever made it.")
    return names


def has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in TOKENIZERS)


def few(names: list[str], most: int = 3) -> str:
    """The first of `names`, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
