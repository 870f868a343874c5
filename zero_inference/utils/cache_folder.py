"""Where files go that are made once and used again: one rule for models, our kernels and DeepSpeed's compiled modules.

| what | folder |
|---|---|
| unpacked models | `${ZERO_INFERENCE_CACHE}`, by default `${XDG_CACHE_HOME:-~/.cache}/zero-inference` |
| DeepSpeed's modules | `${TORCH_EXTENSIONS_DIR}`, by default a folder of `${XDG_CACHE_HOME:-~/.cache}/zero-inference/extensions` |
| what was measured of a machine | the file `${ZERO_INFERENCE_MACHINE}`, by default one named after the machine in that of unpacked models |
| our kernels, and what their trials found | the same two, but never in a folder of DeepSpeed's modules |
"""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path

from zero_inference.errors import UsageError

OURS = "zero-inference/extensions"


def user_cache() -> Path:
    """The user's folder for caches, absolute. An empty XDG_CACHE_HOME is as none (XDG Base Directory Specification)."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser().absolute()


def models_folder() -> Path:
    """Of checkpoints that were unpacked here."""
    own = os.environ.get("ZERO_INFERENCE_CACHE")
    return Path(own).expanduser().absolute() if own else user_cache() / "zero-inference"


def extensions_folder() -> Path:
    """Of compiled code. TORCH_EXTENSIONS_DIR where the user chose one (DeepSpeed's engine sets it to a folder in ours), else ours."""
    given = os.environ.get("TORCH_EXTENSIONS_DIR")
    return Path(given) if given and OURS not in given else user_cache() / OURS


def machine_path() -> Path:
    """Of what was measured of this machine: its own, because home folders are shared by machines."""
    if given := os.environ.get("ZERO_INFERENCE_MACHINE"):
        return Path(given).expanduser().absolute()
    return models_folder() / f"machine-{re.sub(r'[^A-Za-z0-9.-]', '_', platform.node()) or 'this'}.json"


def made_folder(folder: Path) -> Path:
    """Return `folder`, made if need be.

    Raises:
        UsageError: it cannot be made, for instance because a file is in its way.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        file = next((path for path in (folder, *folder.parents) if os.path.lexists(path) and not path.is_dir()), None)
        given = ((name, os.environ.get(name, "")) for name in ("ZERO_INFERENCE_CACHE", "TORCH_EXTENSIONS_DIR"))
        asked = (name for name, value in given if value and OURS not in value and str(folder).startswith(value))
        name = next(asked, "XDG_CACHE_HOME")
        raise UsageError(
            f"the cache folder {folder} cannot be made: {error.strerror if file is None else f'{file} is a file; remove it'}, "
            f"or name another folder with {name}."
        ) from error
    return folder
