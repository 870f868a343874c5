"""`--assume gpus=1x24GiB,host=128GiB,link=25GB/s`: a machine in a line, or what is different about one from a file."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, get_args

from zero_inference.errors import UsageError
from zero_inference.link.description import CoreRates, Cores, Description, Gpu, Products

CONTEXT_BYTES = 512 << 20  # of a GPU, left to CUDA itself: an estimate, where a measured machine has what was found
ROWS = (1, 1 << 16)  # between which an assumed rate of the cores holds: the one that is said
EXAMPLE = "gpus=1x24GiB,host=128GiB,link=25GB/s"

_UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}
_NUMBER = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z/]*)")


def assumed(text: str, base: Description | None = None) -> Description:
    """The machine that `text` says, or `base` with what `text` says of it.

    Raises:
        UsageError: a part that cannot be read, or without a base one that is missing.
    """
    said: dict[str, Any] = {}
    for part in text.split(","):
        name, equals, value = (each.strip() for each in part.partition("="))
        if not equals or name not in _READERS:
            raise UsageError(f"--assume {part.strip() or repr('')}: say one of {', '.join(_READERS)}, as in {EXAMPLE}.")
        if name in said:
            raise UsageError(f"--assume: {name} is said twice; say it once.")
        said[name] = _READERS[name](name, value)
    if base is None and (missing := [name for name in ("gpus", "host") if name not in said]):
        raise UsageError(f"--assume {text}: {' and '.join(missing)} not said; as in {EXAMPLE}.")
    start = base or Description(source="assumed", name="assumed machine", gpus=(), host_memory_bytes=0)
    changes = {_FIELDS[name]: value for name, value in said.items() if name in _FIELDS}
    if "matmul" in said:
        changes["matmul_tflops"] = dict.fromkeys(("float16", "bfloat16"), said["matmul"])
    found = start.model_copy(update={**changes, "source": "assumed"})
    if "cores" in said:
        found = found.model_copy(update={"cores": _cores(said["cores"], found)})
    return found


def _cores(gb_per_s: float, machine: Description) -> Cores:
    """Cores that read and multiply at one rate, whatever the format and however few the tokens, beside a link that they do not slow."""
    if machine.link_gb_per_s is None:
        raise UsageError("--assume cores: the rate of the link beside them is not known; say link= too.")
    rates = [
        CoreRates(
            format=kind,
            rows=rows,
            link_gb_per_s=machine.link_gb_per_s,
            cores_gb_per_s=gb_per_s,
            cores_alone_gb_per_s=gb_per_s,
            crossing_s=0.0,
        )
        for kind in get_args(Products)
        for rows in ROWS
    ]
    return Cores(threads=1, instructions="", read_gb_per_s=gb_per_s, products=tuple(rates))


def _gpus(name: str, text: str) -> tuple[Gpu, ...]:
    count, times, size = text.lower().partition("x")
    if text == "0":
        return ()
    if not times or not count.isdigit() or not 1 <= int(count) <= 1024:
        raise UsageError(f"--assume {name}={text}: say how many and how large, as in 1x24GiB, or 0 for none.")
    memory = _size(f"{name}={count}x", text[len(count) + 1 :])
    if memory < 2 * CONTEXT_BYTES:
        raise UsageError(f"--assume {name}={text}: a GPU has 1 GiB or more.")
    gpu = Gpu(name=f"GPU with {memory / 2**30:.3g} GiB", memory_bytes=memory, free_bytes=memory - CONTEXT_BYTES)
    return (gpu,) * int(count)


def _size(name: str, text: str) -> int:
    number, unit = _split(name, text, "128GiB")
    if unit not in _UNITS:
        raise UsageError(f"--assume {_said(name, text)}: give a unit, one of {', '.join(_UNITS)}, as in 128GiB.")
    return int(number * _UNITS[unit])


def _rate(name: str, text: str) -> float:
    """GB/s of 1e9 bytes."""
    number, unit = _split(name, text, "25GB/s")
    if unit not in {f"{each}/s" for each in _UNITS}:
        raise UsageError(f"--assume {name}={text}: give a unit, such as GB/s (1e9 bytes a second), as in 25GB/s.")
    return _above_zero(name, text, number * _UNITS[unit.removesuffix("/s")] / 1e9)


def _tflops(name: str, text: str) -> float:
    number, unit = _split(name, text, "150TFLOP/s")
    if unit not in ("TFLOP/s", "TFLOPS", "TFLOPs"):
        raise UsageError(f"--assume {name}={text}: give it in TFLOP/s, as in 150TFLOP/s.")
    return _above_zero(name, text, number)


def _split(name: str, text: str, example: str) -> tuple[float, str]:
    found = _NUMBER.fullmatch(text)
    if found is None:
        raise UsageError(f"--assume {_said(name, text)}: no number with a unit, as in {example}.")
    return float(found[1]), found[2]


def _said(name: str, text: str) -> str:
    """A part as it was written; `name` may have the beginning of its value already."""
    return f"{name}{text}" if "=" in name else f"{name}={text}"


def _above_zero(name: str, text: str, value: float) -> float:
    if not 0 < value < 1e9:
        raise UsageError(f"--assume {name}={text}: must be more than 0.")
    return value


_READERS: dict[str, Callable[[str, str], Any]] = {
    "gpus": _gpus,
    "host": _size,
    "link": _rate,
    "cores": _rate,
    "memory": _rate,
    "matmul": _tflops,
    "disk": _rate,
    "disk_free": _size,
}
_FIELDS = {
    "gpus": "gpus",
    "host": "host_memory_bytes",
    "link": "link_gb_per_s",
    "memory": "device_gb_per_s",
    "disk": "disk_gb_per_s",
    "disk_free": "disk_free_bytes",
}
