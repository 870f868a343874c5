"""`--assume gpus=1x24GiB,host=128GiB,link=25GB/s`: a machine in a line, or what is different about one from a file."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, get_args

from zero_inference.errors import UsageError
from zero_inference.hardware.description import LEAST_RATE, MOST, CoreRates, Cores, Description, Gpu, Products, Source
from zero_inference.utils.format import UNIT_BYTES, UNITS, parse_number_and_unit
from zero_inference.utils.suggestions import did_you_mean

# Of a GPU, left to CUDA itself: an estimate, where a measured machine has what was found.
CONTEXT_BYTES = 512 << 20
ROWS = (1, 1 << 16)  # tokens of a pass, between which an assumed rate of the cores holds
MOST_GPUS = 1024
EXAMPLE = "gpus=1x24GiB,host=128GiB,link=25GB/s"

_GPUS = re.compile(r"([0-9]{1,6})\s*[xX]\s*(.*)")


def assumed(text: str, base: Description | None = None) -> Description:
    """The machine that `text` says, or `base` with what `text` says of it.

    Raises:
        UsageError: a part that cannot be read, or without a base one that is missing.
    """
    said = _parts(text)
    if base is None and (missing := [name for name in ("gpus", "host") if name not in said]):
        raise UsageError(f"--assume {text}: {' and '.join(missing)} missing; write it as in {EXAMPLE}.")
    if base is None:
        start = Description(source="assumed", name="a machine that is not there", gpus=(), host_memory_bytes=0)
    else:
        start = _without_other_device(base, said.get("gpus")).model_copy(update={"name": f"{base.name} with {text}"})
    changes = {_FIELDS[name]: value for name, value in said.items() if name in _FIELDS}
    if "matmul" in said:
        changes["matmul_tflops"] = dict.fromkeys(("float16", "bfloat16"), said["matmul"])
    if "memory" in said:  # these were measured with another
        changes |= {"device_products": (), "own_work": (), "loading": None}
        if start.launches is not None:
            changes["launches"] = start.launches.model_copy(update={"attention": (), "attention_gb_per_s": None})
    if "link" in said and "pageable" not in said and start.link_gb_per_s and start.pageable_link_gb_per_s:
        changes["pageable_link_gb_per_s"] = start.pageable_link_gb_per_s * said["link"] / start.link_gb_per_s
    found = start.model_copy(update={**changes, "source": _source(start, said)})
    if "cores" in said:
        return found.model_copy(update={"cores": _cores(said["cores"], found)})
    if "link" in said and start.link_gb_per_s and start.cores:
        return found.model_copy(update={"cores": _beside(start.cores, said["link"] / start.link_gb_per_s)})
    return found


def _source(base: Description, said: dict[str, Any]) -> Source:
    """Rates of a datasheet that are not replaced stay bounds that no machine reaches, and plans say so."""
    left = {"link", "memory", "matmul"} | ({"peers"} if isinstance(base.peers_gb_per_s, float) else set())
    left -= said.keys()
    return "datasheet" if base.source == "datasheet" and left else "assumed"


def _parts(text: str) -> dict[str, Any]:
    said: dict[str, Any] = {}
    for part in text.split(","):
        name, equals, value = (each.strip() for each in part.partition("="))
        name = name.lower().replace("-", "_")
        if not equals or name not in _READERS:
            what = part.strip() or "has nothing between two commas, or after the last one"
            near = did_you_mean(f"{name}=", [f"{each}=" for each in _READERS]) if equals else ""
            meant = f" ({near})" if near else ""
            raise UsageError(
                f"--assume {what}{meant}: use {', '.join(_READERS)}, separated by commas, as in {EXAMPLE}."
            )
        if name in said:
            raise UsageError(f"--assume: {name} is given twice; give it once.")
        said[name] = _READERS[name](name, value)
    return said


def _without_other_device(base: Description, gpus: tuple[Gpu, ...] | None) -> Description:
    """Without the rates of its device where that becomes a GPU or stops being one."""
    if gpus is None or bool(gpus) == bool(base.gpus):
        return base
    copies = "link_gb_per_s", "pageable_link_gb_per_s", "peers_gb_per_s", "device_gb_per_s"
    gone = dict.fromkeys((*copies, "cores", "launches", "loading", "process_bytes"))
    none = {"matmul_tflops": {}, "device_products": (), "own_work": (), "measuring_bytes": 0, "library_bytes": {}}
    return base.model_copy(update={**gone, **none})


def _beside(cores: Cores, times: float) -> Cores:
    """The same beside a link that is so many times as fast, and gives up the same share to them."""
    products = tuple(each.model_copy(update={"link_gb_per_s": each.link_gb_per_s * times}) for each in cores.products)
    return cores.model_copy(update={"products": products})


def _cores(gb_per_s: float, machine: Description) -> Cores:
    """Cores that read and multiply at one rate, whatever the format and however few the tokens, beside a link that they do not slow."""
    link_gb_per_s = machine.link_gb_per_s
    if link_gb_per_s is None or machine.device_gb_per_s is None:
        missing = "link" if link_gb_per_s is None else "memory"
        raise UsageError(
            f"--assume cores: their share of the work depends on {missing}, whose rate is not known; add {missing}=."
        )
    rates = [
        CoreRates(
            format=kind,
            rows=rows,
            link_gb_per_s=link_gb_per_s,
            cores_gb_per_s=gb_per_s,
            cores_alone_gb_per_s=gb_per_s,
            crossing_s=0.0,
        )
        for kind in get_args(Products)
        for rows in ROWS
    ]
    return Cores(threads=1, instructions="", read_gb_per_s=gb_per_s, products=tuple(rates))


def _gpus(name: str, text: str) -> tuple[Gpu, ...]:
    if text == "0":
        return ()
    found = _GPUS.fullmatch(text)
    if found is None or not 1 <= int(found[1]) <= MOST_GPUS:
        raise UsageError(f"--assume {name}={text}: give their number and memory, as in 1x24GiB, or 0 for none.")
    memory = _size(f"{name}={found[1]}x", found[2])
    if memory < 2 * CONTEXT_BYTES:
        raise UsageError(f"--assume {name}={text}: a GPU has 1 GiB or more.")
    gpu = Gpu(name=f"GPU with {memory / 2**30:.3g} GiB", memory_bytes=memory, free_bytes=memory - CONTEXT_BYTES)
    return (gpu,) * int(found[1])


def _size(name: str, text: str) -> int:
    number, unit = _split(name, text, "128GiB")
    unit = unit or "gib"  # as in --gpu-memory 10
    if unit not in UNIT_BYTES:
        raise UsageError(f"--assume {_said(name, text)}: the unit is one of {', '.join(UNITS)}, as in 128GiB.")
    return int(_in_range(name, text, number * UNIT_BYTES[unit], least=0))


def _rate(name: str, text: str) -> float:
    """GB/s of 1e9 bytes."""
    number, unit = _split(name, text, "25GB/s")
    if not unit.endswith("/s") or unit.removesuffix("/s") not in UNIT_BYTES:
        raise UsageError(f"--assume {name}={text}: the unit must be bytes a second, such as GB/s (1e9), as in 25GB/s.")
    return _in_range(name, text, number * UNIT_BYTES[unit.removesuffix("/s")] / 1e9)


def _peers(name: str, text: str) -> float | str:
    """Between GPUs: a rate, or `link` where they have no other way."""
    return "link" if text.lower() == "link" else _rate(name, text)


def _tflops(name: str, text: str) -> float:
    number, unit = _split(name, text, "150TFLOP/s")
    if unit not in ("tflop/s", "tflops"):
        raise UsageError(f"--assume {name}={text}: give it in TFLOP/s, as in 150TFLOP/s.")
    return _in_range(name, text, number)


def _split(name: str, text: str, example: str) -> tuple[float, str]:
    """The number, and the unit in lower case."""
    found = parse_number_and_unit(text)
    if found is None:
        raise UsageError(f"--assume {_said(name, text)}: no number with a unit, as in {example}.")
    return found


def _in_range(name: str, text: str, value: float, least: float | None = None) -> float:
    """`value` if it is at least `least`, or without one more than 0."""
    if value < 0 or (least is None and value == 0):
        raise UsageError(f"--assume {_said(name, text)}: must be {'more than 0' if least is None else '0 or more'}.")
    if value > MOST or (least is None and value < LEAST_RATE):
        raise UsageError(
            f"--assume {_said(name, text)}: that is {'more' if value > MOST else 'less'} than any machine has."
        )
    return value


def _said(name: str, text: str) -> str:
    """A part as it was written; `name` may have the beginning of its value already."""
    return f"{name}{text}" if "=" in name else f"{name}={text}"


_READERS: dict[str, Callable[[str, str], Any]] = {
    "gpus": _gpus,
    "host": _size,
    "link": _rate,
    "pageable": _rate,
    "peers": _peers,
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
    "pageable": "pageable_link_gb_per_s",
    "peers": "peers_gb_per_s",
    "memory": "device_gb_per_s",
    "disk": "disk_gb_per_s",
    "disk_free": "disk_free_bytes",
}
