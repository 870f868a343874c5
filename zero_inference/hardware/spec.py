"""Machines that are not here: datasheets of cards (cards.json), typical machines by name, and machines written in a line (`--assume`).

Imports no torch, so that a bad `--machine` or `--assume` is refused at once.
"""

from __future__ import annotations

import functools
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, get_args

from pydantic import ValidationError

from zero_inference.errors import UsageError
from zero_inference.hardware.profile import (
    CpuProductRate,
    CpuProfile,
    Gpu,
    HardwareProfile,
    WeightFormat,
    describe_first,
    read_profile,
)
from zero_inference.utils.format import (
    PIPED_WIDTH,
    UNIT_BYTES,
    Column,
    closest,
    decimals,
    parse_number_and_unit,
    print_rows,
)

TABLE = Path(__file__).resolve().parent / "cards.json"
MAKER = {"nvidia", "tesla", "quadro", "geforce"}
CONTEXT_BYTES = 512 << 20  # estimated device memory of CUDA itself; a measured machine has what was found
MAX_GPUS = 1024
# PCI Express generation -> (GT/s of a lane, share of the transferred bits that are data), Base Specification, revisions 1.0 to 6.0:
# 8b/10b, then 128b/130b; from 6.0 flits of 256 bytes with 236 of packets.
LANE_RATES = {
    1: (2.5, 8 / 10),
    2: (5.0, 8 / 10),
    3: (8.0, 128 / 130),
    4: (16.0, 128 / 130),
    5: (32.0, 128 / 130),
    6: (64.0, 236 / 256),
}


def link_gb_per_s(generation: int | None, width: int | None) -> float | None:
    """Return GB/s (1e9) of a link, one direction before packet headers; None for an unknown generation or width."""
    if generation not in LANE_RATES or not width:
        return None
    rate, share = LANE_RATES[generation]
    return rate * share * width / 8


class Figure(NamedTuple):
    """A figure of a datasheet in TFLOP/s (1e12) or GB/s (1e9), and its document."""

    value: float
    source: str


@dataclass(frozen=True)
class Card:
    """One form of a card."""

    name: str
    matches: tuple[str, ...]  # words that are all in the name that CUDA gives the device
    tflops: dict[str, Figure]  # dense, by type; fp32 of CUDA cores, others of tensor cores that accumulate in float32
    memory: Figure  # bandwidth of the device memory
    nvlink: Figure | None  # to other cards, both directions summed; None if that takes a bridge or the card has none
    memory_bytes: int | None  # without what error correction takes; None if a card is sold with several sizes


@functools.cache
def _table() -> dict[str, Any]:
    return json.loads(TABLE.read_text(encoding="utf-8"))


@functools.cache
def cards() -> tuple[Card, ...]:
    found = []
    for row in _table()["cards"]:
        rates = {name: row.get(name) for name in ("memory_gbps", "nvlink_gbps")} | row["tflops"]
        known = {name: Figure(pair[0], _table()["sources"][pair[1]]) for name, pair in rates.items() if pair}
        # makers' GB are GiB; GDDR6 has no bits of its own for error correction, which takes a sixteenth
        memory_bytes = int(row["memory_gb"][0] * (1 << 30)) if "memory_gb" in row else None
        if memory_bytes and row.get("ecc_in_memory"):
            memory_bytes -= memory_bytes // 16
        memory, nvlink = known.pop("memory_gbps"), known.pop("nvlink_gbps", None)
        found.append(Card(row["name"], tuple(row["matches"]), known, memory, nvlink, memory_bytes))
    return tuple(found)


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
    """A machine that many people have or rent."""

    name: str
    card: str  # its name in cards.json
    generation: int  # of PCI Express with 16 lanes, by the card's datasheet
    host_gib: int  # for each GPU; no datasheet has that: it is what PCs and rented machines with this card often have

    def profile(self, gpus: int = 1) -> HardwareProfile:
        """Return the profile of a machine with this many of its GPUs, each with a link of its own, which GPUs without NVLink also use for
        each other. Rates that no datasheet has are unknown: kernel launches, CPU products, pageable copies, all links at once, the disk.
        """
        card = next(card for card in cards() if card.name == self.card)
        assert card.memory_bytes is not None, f"{card.name} has one size"
        gpu = Gpu(name=card.name, memory_bytes=card.memory_bytes, free_bytes=card.memory_bytes - CONTEXT_BYTES)
        dtypes = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}
        return HardwareProfile(
            source="datasheet",
            name=f"{gpus}x{self.name}" if gpus > 1 else self.name,
            gpus=(gpu,) * gpus,
            host_memory_bytes=gpus * self.host_gib << 30,
            link_gb_per_s=link_gb_per_s(self.generation, 16),
            peers_gb_per_s=card.nvlink.value / 2 if card.nvlink else "link",
            device_gb_per_s=card.memory.value,
            matmul_tflops={dtype: card.tflops[kind].value for dtype, kind in dtypes.items() if kind in card.tflops},
        )


@functools.cache
def typical_machines() -> dict[str, TypicalMachine]:
    return {row["name"]: TypicalMachine(**row) for row in _table()["machines"]}


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
    rows = []
    for machine in typical_machines().values():
        profile = machine.profile()
        rows.append(
            {
                "name": machine.name,
                "gpu": machine.card,
                "memory_gib": profile.gpus[0].memory_bytes / (1 << 30),
                "memory_gbps": profile.device_gb_per_s,
                "link": f"PCIe {machine.generation} x16",
                "link_gbps": profile.link_gb_per_s,
                "peers": "the link" if profile.peers_gb_per_s == "link" else f"{profile.peers_gb_per_s:g} GB/s",
                **{f"{dtype}_tflops": profile.matmul_tflops.get(dtype) for dtype in ("float16", "bfloat16")},
                "host_gib": machine.host_gib,
            }
        )
    print_rows(rows, columns, format, piped_width=PIPED_WIDTH, gap=2)


def resolve_profile(name: str | None, assume: str | None) -> HardwareProfile | None:
    """Return the profile that `--machine` and `--assume` give; None for this machine. Raises UsageError: there is no such machine, or file
    or line have an invalid value."""
    base = None if name is None else _load_profile(name)
    return base if assume is None else parse_assumed(assume, base)


def _load_profile(name: str) -> HardwareProfile:
    """Read a file if it exists, else return the typical machine of that name, with several GPUs as in `2xrtx4090`."""
    path = Path(os.path.expanduser(name))
    plain = re.sub("[_ ]", "-", name.strip().lower())
    several = re.fullmatch(r"([1-9][0-9]{0,3})x-?(.+)", plain)
    gpus, one = (int(several[1]), several[2]) if several else (1, plain)
    if not os.path.lexists(path) and one in typical_machines() and gpus <= MAX_GPUS:
        return typical_machines()[one].profile(gpus)
    if os.path.lexists(path) or os.sep in name or path.suffix:
        return read_profile(path)
    near = ", ".join(f"{gpus}x{each}" if gpus > 1 else each for each in closest(one, typical_machines()))
    raise UsageError(
        f"--machine {name}: no such file, and no typical machine of that name{f' (did you mean {near}?)' if near else ''}. There are "
        f"{', '.join(typical_machines())}, with several GPUs as in 2xrtx4090; zero-inference link --save FILE writes a file."
    )


EXAMPLE = "gpus=1x24GiB,host=128GiB,link=25GB/s"
ASSUMED_ROWS = (1, 1 << 16)  # tokens of a pass between which an assumed CPU rate holds
SIZES = UNIT_BYTES | {"": 1 << 30}  # without a unit in GiB, as in --gpu-memory 10
RATES = {f"{unit}/s": nbytes / 1e9 for unit, nbytes in UNIT_BYTES.items()}


class Part(NamedTuple):
    """A part of `--assume`: the field of the profile that it sets, if it is one; units in lower case; an example value."""

    field: str | None
    units: dict[str, float]
    example: str


PARTS = {
    "gpus": Part("gpus", SIZES, "1x24GiB"),
    "host": Part("host_memory_bytes", SIZES, "128GiB"),
    "link": Part("link_gb_per_s", RATES, "25GB/s"),
    "links": Part("all_links_gb_per_s", RATES, "40GB/s"),
    "pageable": Part("pageable_link_gb_per_s", RATES, "10GB/s"),
    "peers": Part("peers_gb_per_s", RATES, "300GB/s"),
    "cores": Part(None, RATES, "60GB/s"),
    "memory": Part("device_gb_per_s", RATES, "1000GB/s"),
    "matmul": Part(None, {"tflop/s": 1.0, "tflops": 1.0}, "150TFLOP/s"),
    "disk": Part("disk_gb_per_s", RATES, "3GB/s"),
    "disk_free": Part("disk_free_bytes", SIZES, "1TiB"),
}


def parse_assumed(text: str, base: HardwareProfile | None = None) -> HardwareProfile:
    """Return the machine of a line such as `EXAMPLE`, or `base` with the values of the line. Raises UsageError: an invalid part, or without
    `base` a missing one."""
    given: dict[str, Any] = {}
    for part in text.split(","):
        name, value = _parse_part(part)
        if name in given:
            raise UsageError(f"--assume: {name} is given twice; give it once.")
        given[name] = value
    if base is None:
        if missing := [name for name in ("gpus", "host") if name not in given]:
            raise UsageError(f"--assume {text}: {' and '.join(missing)} missing; write it as in {EXAMPLE}.")
        start = HardwareProfile(source="assumed", name="a machine that is not there", gpus=(), host_memory_bytes=0)
    else:
        start = _drop_other_device(base, given.get("gpus")).model_copy(update={"name": f"{base.name} with {text}"})
    changes: dict[str, Any] = {field: given[name] for name, (field, *_) in PARTS.items() if field and name in given}
    # real hardware never reaches the rates of datasheets, and plans say so while some are left
    left = {"link", "memory", "matmul"} | ({"peers"} if isinstance(start.peers_gb_per_s, float) else set())
    changes["source"] = "datasheet" if start.source == "datasheet" and left - given.keys() else "assumed"
    if "matmul" in given:
        changes["matmul_tflops"] = dict.fromkeys(("float16", "bfloat16"), given["matmul"])
    if "memory" in given:  # these were measured with another one
        changes |= {"device_products": (), "engine_overheads": (), "loading": None}
        if start.launches is not None:
            changes["launches"] = start.launches.model_copy(update={"attention": (), "attention_gb_per_s": None})
    gpus = len(changes.get("gpus", start.gpus))
    if "links" in given and gpus < 2:
        raise UsageError("--assume links: that is the rate of several GPUs' links together; give link= for one GPU.")
    if {"link", "links"} & given.keys() or gpus != len(start.gpus):
        # pageable copies, and those beside the CPU, change by the same share; several links at once are no longer those that were measured
        faster = given["link"] / start.link_gb_per_s if "link" in given and start.link_gb_per_s else 1.0
        changes.setdefault("all_links_gb_per_s", None)
        if start.pageable_link_gb_per_s:
            changes.setdefault("pageable_link_gb_per_s", start.pageable_link_gb_per_s * faster)
        if start.cores:
            products = tuple(
                each.model_copy(update={"link_gb_per_s": each.link_gb_per_s * faster})
                for each in start.cores.products
                if each.gpus == 1
            )
            changes["cores"] = start.cores.model_copy(update={"products": products})
    try:
        found = HardwareProfile.model_validate(dict(start) | changes)
        return found.model_copy(update={"cores": _assume_cpu(given["cores"], found)}) if "cores" in given else found
    except ValidationError as error:
        raise UsageError(f"--assume {text}: {describe_first(error)}; no machine has that.") from error


def _parse_part(part: str) -> tuple[str, Any]:
    """Return name and value of a part such as `host=128GiB`; ranges are not checked."""
    name, equals, text = (each.strip() for each in part.partition("="))
    name = name.lower().replace("-", "_")
    if not equals or name not in PARTS:
        raise UsageError(f"--assume {part.strip() or 'has an empty part'}: use {', '.join(PARTS)}, as in {EXAMPLE}.")
    _, units, example = PARTS[name]
    if (name, text) == ("gpus", "0"):
        return name, ()
    if (name, text.lower()) == ("peers", "link"):
        return name, "link"
    count, found = 1, parse_number_and_unit(text)
    if name == "gpus":
        several = re.fullmatch(r"([1-9][0-9]{0,3})\s*[xX](.+)", text, re.ASCII)
        count, found = (int(several[1]), parse_number_and_unit(several[2])) if several else (0, None)
    if found is None or found[1] not in units or count > MAX_GPUS:
        raise UsageError(f"--assume {part.strip()}: give it as in {name}={example}.")
    value = found[0] * units[found[1]]
    if name == "gpus":
        nbytes = int(value)
        if not 2 * CONTEXT_BYTES <= nbytes <= 1 << 50:
            raise UsageError(f"--assume {part.strip()}: a GPU has 1 GiB or more, up to 1 PiB.")
        gpu = Gpu(name=f"GPU with {nbytes / 2**30:.3g} GiB", memory_bytes=nbytes, free_bytes=nbytes - CONTEXT_BYTES)
        return name, (gpu,) * count
    return name, int(value) if units is SIZES else value


def _drop_other_device(base: HardwareProfile, gpus: tuple[Gpu, ...] | None) -> HardwareProfile:
    """Return `base` without the rates of its device if that becomes a GPU or stops being one."""
    if gpus is None or bool(gpus) == bool(base.gpus):
        return base
    kept = "source measured_with name measured_at others_cpu_share versions gpus host_memory_bytes disk_free_bytes disk_gb_per_s"
    kept += " disk_read_bytes disk_queue_depth"
    return HardwareProfile(**{name: getattr(base, name) for name in kept.split()})


def _assume_cpu(gb_per_s: float, machine: HardwareProfile) -> CpuProfile:
    """Return a CPU that reads and multiplies at one rate for any format and batch, beside a link that it does not slow."""
    if machine.link_gb_per_s is None or machine.device_gb_per_s is None:
        missing = "link" if machine.link_gb_per_s is None else "memory"
        raise UsageError(f"--assume cores: their share of the work depends on {missing}; add {missing}=.")
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
