"""Machines that are not here: datasheets of cards (cards.json), typical machines by name, and machines written in a line (`--assume`).

Imports no torch, so that a bad `--machine` or `--assume` is refused at once.
"""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from zero_inference.errors import UsageError
from zero_inference.hardware.profile import (
    LEAST_RATE,
    MOST,
    CpuProductRate,
    CpuProfile,
    Gpu,
    HardwareProfile,
    Source,
    WeightFormat,
    read_profile,
)
from zero_inference.hardware.system import link_gb_per_s
from zero_inference.utils.format import UNIT_BYTES, UNITS, decimals, parse_number_and_unit
from zero_inference.utils.suggestions import closest, did_you_mean
from zero_inference.utils.tables import PIPED_WIDTH, Column, print_rows

TABLE = Path(__file__).resolve().parent / "cards.json"
MAKER = {"nvidia", "tesla", "quadro", "geforce"}
RATES = ("fp32", "tf32", "fp16", "bf16")
CONTEXT_BYTES = 512 << 20  # estimated device memory of CUDA itself; a measured machine has what was found
MOST_GPUS = 1024


@dataclass(frozen=True)
class Rate:
    """A figure of a datasheet in TFLOP/s (1e12) or GB/s (1e9), and its document."""

    value: float
    source: str


@dataclass(frozen=True)
class Card:
    """One form of a card.

    Attributes:
        matches: words that are all in the name that CUDA gives the device.
        tflops: dense rates (no sparsity) by type; fp32 of CUDA cores, the others of tensor cores that accumulate in float32.
        memory: bandwidth of the device memory.
        nvlink: to other cards, both directions summed; None if that takes a bridge or the card has none.
        memory_bytes: without what error correction takes; None if a card is sold with several sizes.
    """

    name: str
    matches: tuple[str, ...]
    tflops: dict[str, Rate]
    memory: Rate
    nvlink: Rate | None = None
    memory_bytes: int | None = None


@functools.cache
def cards() -> tuple[Card, ...]:
    table = json.loads(TABLE.read_text(encoding="utf-8"))

    def rate(pair: list) -> Rate:
        value, source = pair
        return Rate(value, table["sources"][source])

    return tuple(
        Card(
            name=row["name"],
            matches=tuple(row["matches"]),
            tflops={kind: rate(row["tflops"][kind]) for kind in RATES if kind in row["tflops"]},
            memory=rate(row["memory_gbps"]),
            nvlink=rate(row["nvlink_gbps"]) if "nvlink_gbps" in row else None,
            memory_bytes=_memory_bytes(row),
        )
        for row in table["cards"]
    )


def _memory_bytes(row: dict) -> int | None:
    """Makers' GB of memory are GiB: an A100 of 40 GB has 40960 MiB. GDDR6 has no bits of its own for error correction, for which a T4 of
    16 GB reserves 1 and a L40S of 48 GB reserves 3."""
    if "memory_gb" not in row:
        return None
    nbytes = int(row["memory_gb"][0] * (1 << 30))
    return nbytes - nbytes // 16 if row.get("ecc_in_memory") else nbytes


def card_of(name: str) -> Card:
    """Return the card of this name in cards.json."""
    return next(card for card in cards() if card.name == name)


def find_card(device_name: str) -> Card | None:
    """Return the card that CUDA calls `device_name` (such as "NVIDIA H200"); None if it is not in the table.

    Each word has to be the card's, its maker's or a memory size: an RTX 3090 Ti, a laptop's RTX 4090 or a MIG slice of an H100 is another
    card than the one whose name it begins with.
    """
    words = set(device_name.lower().replace("-", " ").split())
    for card in cards():
        parts = {part.lower() for part in card.matches}
        if parts <= words and all(re.fullmatch(r"\d+gb", word) for word in words - parts - MAKER):
            return card
    return None


@dataclass(frozen=True)
class TypicalMachine:
    """A machine that many people have or rent.

    Attributes:
        card: its name in cards.json.
        generation: of PCI Express with 16 lanes, by the card's datasheet.
        host_gib: host memory for each GPU. No datasheet has that: it is what PCs and rented machines with this card often have.
    """

    name: str
    card: str
    generation: int
    host_gib: int

    @property
    def link_gb_per_s(self) -> float:
        """One direction before packet headers: no copy is faster."""
        rate = link_gb_per_s(self.generation, LANES)
        assert rate is not None, "all generations are known"
        return rate

    def profile(self, gpus: int = 1) -> HardwareProfile:
        """Return the profile of a machine with this many of its GPUs, each with a link of its own, which GPUs without NVLink also use for
        each other. Rates that no datasheet has are unknown: kernel launches, CPU products, pageable copies, the disk."""
        card = card_of(self.card)
        assert card.memory_bytes is not None, f"{card.name} has one size"
        gpu = Gpu(name=card.name, memory_bytes=card.memory_bytes, free_bytes=card.memory_bytes - CONTEXT_BYTES)
        dtypes = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}
        return HardwareProfile(
            source="datasheet",
            name=f"{f'{gpus}x' if gpus > 1 else ''}{self.name}",
            gpus=(gpu,) * gpus,
            host_memory_bytes=gpus * self.host_gib << 30,
            link_gb_per_s=self.link_gb_per_s,
            peers_gb_per_s=card.nvlink.value / 2 if card.nvlink else "link",
            device_gb_per_s=card.memory.value,
            matmul_tflops={dtype: card.tflops[kind].value for dtype, kind in dtypes.items() if kind in card.tflops},
        )


LANES = 16
TYPICAL = (
    TypicalMachine("rtx3090", "RTX 3090", 4, 64),
    TypicalMachine("rtx4090", "RTX 4090", 4, 64),
    TypicalMachine("rtx5090", "RTX 5090", 5, 64),
    TypicalMachine("rtx-a6000", "RTX A6000", 4, 128),
    TypicalMachine("t4", "T4", 3, 64),
    TypicalMachine("l4", "L4", 4, 64),
    TypicalMachine("a10", "A10", 4, 64),
    TypicalMachine("l40s", "L40S", 4, 128),
    TypicalMachine("a100-40", "A100 SXM 40 GB", 4, 128),
    TypicalMachine("a100-80", "A100 SXM 80 GB", 4, 256),
    TypicalMachine("a100-80-pcie", "A100 PCIe 80 GB", 4, 256),
    TypicalMachine("h100-pcie", "H100 PCIe", 5, 256),
    TypicalMachine("h100-nvl", "H100 NVL", 5, 256),
    TypicalMachine("h100-sxm", "H100 SXM", 5, 256),
    TypicalMachine("h200-sxm", "H200 SXM", 5, 256),
)
NAMES = tuple(each.name for each in TYPICAL)


def find_typical(name: str) -> HardwareProfile | None:
    """Return the typical machine `name`, or one with several of its GPUs (`2xrtx4090`); None for another name."""
    gpus, one = _split_name(name)
    found = next((each for each in TYPICAL if each.name == one), None)
    return found.profile(gpus) if found is not None and 1 <= gpus <= MOST_GPUS else None


def _split_name(name: str) -> tuple[int, str]:
    """Return the number of GPUs, and the rest of the name as in `NAMES`."""
    plain = name.strip().lower().replace("_", "-").replace(" ", "-")
    several = re.fullmatch(r"([0-9]{1,6})x-?(.+)", plain)
    return (int(several[1]), several[2]) if several else (1, plain)


def print_typical_machines(format: str = "table") -> None:
    """Print all typical machines with their figures on stdout."""
    columns = (
        Column("name", "--machine", dtype="string", whole=True),
        Column("gpu", "GPU", dtype="string", whole=True),
        Column("memory_gib", "GPU\nGiB", "{:g}".format),
        Column("memory_gbps", "GPU\nGB/s", decimals(0)),
        Column("link", "link", dtype="string", whole=True),
        Column("link_gbps", "link\nGB/s", decimals(1)),
        Column("peers", "GPU to\nGPU", dtype="string"),
        Column("float16_tflops", "fp16\nTFLOP/s", "{:g}".format),
        Column("bfloat16_tflops", "bf16\nTFLOP/s", "{:g}".format),
        Column("host_gib", "assumed\nhost GiB", decimals(0), "Int64"),
    )
    rows = [
        {
            "name": machine.name,
            "gpu": machine.card,
            "memory_gib": profile.gpus[0].memory_bytes / (1 << 30),
            "memory_gbps": profile.device_gb_per_s,
            "link": f"PCIe {machine.generation} x{LANES}",
            "link_gbps": machine.link_gb_per_s,
            "peers": "the link" if profile.peers_gb_per_s == "link" else f"{profile.peers_gb_per_s:g} GB/s",
            "float16_tflops": profile.matmul_tflops.get("float16"),
            "bfloat16_tflops": profile.matmul_tflops.get("bfloat16"),
            "host_gib": machine.host_gib,
        }
        for machine in TYPICAL
        for profile in [machine.profile()]
    ]
    print_rows(rows, columns, format, piped_width=PIPED_WIDTH, gap=2)


def resolve_profile(name: str | None, assume: str | None) -> HardwareProfile | None:
    """Return the profile that `--machine` and `--assume` give; None for this machine.

    Args:
        name: a file, or a typical machine.
        assume: a line for `parse_assumed`.

    Raises:
        UsageError: there is no such machine, or file or line have an invalid value.
    """
    base = None if name is None else _load_profile(name)
    return base if assume is None else parse_assumed(assume, base)


def _load_profile(name: str) -> HardwareProfile:
    """Read a file if it exists, else take the typical machine of that name."""
    path = Path(os.path.expanduser(name))
    if not os.path.lexists(path) and (typical := find_typical(name)) is not None:
        return typical
    if os.path.lexists(path) or os.sep in name or path.suffix:
        return read_profile(path)
    gpus, one = _split_name(name)
    several = f"{gpus}x" if 1 < gpus <= MOST_GPUS else ""
    near = ", ".join(f"{several}{each}" for each in closest(one, NAMES))
    raise UsageError(
        f"--machine {name}: no such file, and no typical machine of that name{f' (did you mean {near}?)' if near else ''}. There are "
        f"{', '.join(NAMES)}, with several GPUs as in 2x{NAMES[0]}; zero-inference link --save FILE writes a file."
    )


EXAMPLE = "gpus=1x24GiB,host=128GiB,link=25GB/s"
ASSUMED_ROWS = (1, 1 << 16)  # tokens of a pass between which an assumed CPU rate holds


def parse_assumed(text: str, base: HardwareProfile | None = None) -> HardwareProfile:
    """Return the machine of a line such as `EXAMPLE`, or `base` with the values of the line.

    Raises:
        UsageError: an invalid part, or without `base` a missing one.
    """
    given = _parse_parts(text)
    if base is None and (missing := [name for name in ("gpus", "host") if name not in given]):
        raise UsageError(f"--assume {text}: {' and '.join(missing)} missing; write it as in {EXAMPLE}.")
    if base is None:
        start = HardwareProfile(source="assumed", name="a machine that is not there", gpus=(), host_memory_bytes=0)
    else:
        start = _drop_other_device(base, given.get("gpus")).model_copy(update={"name": f"{base.name} with {text}"})
    changes = {_FIELDS[name]: value for name, value in given.items() if name in _FIELDS}
    if "matmul" in given:
        changes["matmul_tflops"] = dict.fromkeys(("float16", "bfloat16"), given["matmul"])
    if "memory" in given:  # these were measured with another one
        changes |= {"device_products": (), "engine_overheads": (), "loading": None}
        if start.launches is not None:
            changes["launches"] = start.launches.model_copy(update={"attention": (), "attention_gb_per_s": None})
    faster = given["link"] / start.link_gb_per_s if "link" in given and start.link_gb_per_s else None
    if faster and "pageable" not in given and start.pageable_link_gb_per_s:
        changes["pageable_link_gb_per_s"] = start.pageable_link_gb_per_s * faster
    found = start.model_copy(update={**changes, "source": _source(start, given)})
    if "cores" in given:
        return found.model_copy(update={"cores": _assume_cpu(given["cores"], found)})
    if faster and start.cores:  # CPU products slow the link by the same share
        products = tuple(
            each.model_copy(update={"link_gb_per_s": each.link_gb_per_s * faster}) for each in start.cores.products
        )
        return found.model_copy(update={"cores": start.cores.model_copy(update={"products": products})})
    return found


def _source(base: HardwareProfile, given: dict[str, Any]) -> Source:
    """Return `datasheet` while datasheet rates are left: real hardware never reaches them, and plans say so."""
    left = {"link", "memory", "matmul"} | ({"peers"} if isinstance(base.peers_gb_per_s, float) else set())
    return "datasheet" if base.source == "datasheet" and left - given.keys() else "assumed"


def _parse_parts(text: str) -> dict[str, Any]:
    given: dict[str, Any] = {}
    for part in text.split(","):
        name, equals, value = (each.strip() for each in part.partition("="))
        name = name.lower().replace("-", "_")
        if not equals or name not in _PARSERS:
            what = part.strip() or "has nothing between two commas, or after the last one"
            near = did_you_mean(f"{name}=", [f"{each}=" for each in _PARSERS]) if equals else ""
            raise UsageError(
                f"--assume {what}{f' ({near})' if near else ''}: use {', '.join(_PARSERS)}, separated by commas, as in {EXAMPLE}."
            )
        if name in given:
            raise UsageError(f"--assume: {name} is given twice; give it once.")
        given[name] = _PARSERS[name](f"{name}=", value)
    return given


def _drop_other_device(base: HardwareProfile, gpus: tuple[Gpu, ...] | None) -> HardwareProfile:
    """Return `base` without the rates of its device if that becomes a GPU or stops being one."""
    if gpus is None or bool(gpus) == bool(base.gpus):
        return base
    copies = "link_gb_per_s", "pageable_link_gb_per_s", "peers_gb_per_s", "device_gb_per_s"
    unknown = dict.fromkeys((*copies, "cores", "launches", "loading", "process_bytes"))
    empty = {
        "matmul_tflops": {},
        "device_products": (),
        "engine_overheads": (),
        "measuring_bytes": 0,
        "library_bytes": {},
    }
    return base.model_copy(update={**unknown, **empty})


def _assume_cpu(gb_per_s: float, machine: HardwareProfile) -> CpuProfile:
    """Return a CPU that reads and multiplies at one rate for any format and batch, beside a link that it does not slow."""
    if machine.link_gb_per_s is None or machine.device_gb_per_s is None:
        missing = "link" if machine.link_gb_per_s is None else "memory"
        raise UsageError(
            f"--assume cores: their share of the work depends on {missing}, whose rate is not known; add {missing}=."
        )
    rates = [
        CpuProductRate(
            format=kind,
            rows=rows,
            link_gb_per_s=machine.link_gb_per_s,
            cores_gb_per_s=gb_per_s,
            cores_alone_gb_per_s=gb_per_s,
            hand_off_s=0.0,
        )
        for kind in get_args(WeightFormat)
        for rows in ASSUMED_ROWS
    ]
    return CpuProfile(threads=1, instructions="", read_gb_per_s=gb_per_s, products=tuple(rates))


# Parsers of the parts. `start` is what was written before `text`, for messages: `gpus=`, or `gpus=2x`.


def _parse_gpus(start: str, text: str) -> tuple[Gpu, ...]:
    if text == "0":
        return ()
    found = re.fullmatch(r"([0-9]{1,6})\s*[xX]\s*(.*)", text)
    if found is None or not 1 <= int(found[1]) <= MOST_GPUS:
        raise UsageError(f"--assume {start}{text}: give their number and memory, as in 1x24GiB, or 0 for none.")
    memory = _parse_size(f"{start}{found[1]}x", found[2])
    if memory < 2 * CONTEXT_BYTES:
        raise UsageError(f"--assume {start}{text}: a GPU has 1 GiB or more.")
    gpu = Gpu(name=f"GPU with {memory / 2**30:.3g} GiB", memory_bytes=memory, free_bytes=memory - CONTEXT_BYTES)
    return (gpu,) * int(found[1])


def _parse_size(start: str, text: str) -> int:
    """Return the bytes of a size such as 128GiB in --assume `start``text`; without a unit in GiB, as in --gpu-memory 10."""
    number, unit = _split(start, text, "128GiB")
    unit = unit or "gib"
    if unit not in UNIT_BYTES:
        raise UsageError(f"--assume {start}{text}: the unit is one of {', '.join(UNITS)}, as in 128GiB.")
    return int(_check_range(start, text, number * UNIT_BYTES[unit], least=0))


def _parse_rate(start: str, text: str) -> float:
    """Return GB/s (1e9)."""
    number, unit = _split(start, text, "25GB/s")
    if not unit.endswith("/s") or unit.removesuffix("/s") not in UNIT_BYTES:
        raise UsageError(f"--assume {start}{text}: the unit must be bytes a second, such as GB/s (1e9), as in 25GB/s.")
    return _check_range(start, text, number * UNIT_BYTES[unit.removesuffix("/s")] / 1e9)


def _parse_peers(start: str, text: str) -> float | str:
    return "link" if text.lower() == "link" else _parse_rate(start, text)


def _parse_tflops(start: str, text: str) -> float:
    number, unit = _split(start, text, "150TFLOP/s")
    if unit not in ("tflop/s", "tflops"):
        raise UsageError(f"--assume {start}{text}: give it in TFLOP/s, as in 150TFLOP/s.")
    return _check_range(start, text, number)


def _split(start: str, text: str, example: str) -> tuple[float, str]:
    """Return the number, and the unit in lower case."""
    found = parse_number_and_unit(text)
    if found is None:
        raise UsageError(f"--assume {start}{text}: no number with a unit, as in {example}.")
    return found


def _check_range(start: str, text: str, value: float, least: float | None = None) -> float:
    """Return `value` if it is at least `least`, or without one more than 0."""
    if value < 0 or (least is None and value == 0):
        raise UsageError(f"--assume {start}{text}: must be {'more than 0' if least is None else '0 or more'}.")
    if value > MOST or (least is None and value < LEAST_RATE):
        raise UsageError(f"--assume {start}{text}: that is {'more' if value > MOST else 'less'} than any machine has.")
    return value


_PARSERS: dict[str, Callable[[str, str], Any]] = {
    "gpus": _parse_gpus,
    "host": _parse_size,
    "link": _parse_rate,
    "pageable": _parse_rate,
    "peers": _parse_peers,
    "cores": _parse_rate,
    "memory": _parse_rate,
    "matmul": _parse_tflops,
    "disk": _parse_rate,
    "disk_free": _parse_size,
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
