"""What NVIDIA's datasheets say a card can do. The numbers and where they come from are in cards.json."""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

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
)
from zero_inference.hardware.system import link_gb_per_s
from zero_inference.utils.format import UNIT_BYTES, UNITS, decimals, parse_number_and_unit
from zero_inference.utils.suggestions import closest, did_you_mean
from zero_inference.utils.tables import PIPED_WIDTH, Column, print_rows

if TYPE_CHECKING:
    from zero_inference.hardware.profile import HardwareProfile


TABLE = Path(__file__).resolve().parent / "cards.json"
MAKER = {"nvidia", "tesla", "quadro", "geforce"}
_SIZE = re.compile(r"\d+gb")
RATES = ("fp32", "tf32", "fp16", "bf16")


@dataclass(frozen=True)
class Rate:
    """One figure of a datasheet: TFLOP/s (1e12) or GB/s (1e9), and the document it stands in."""

    value: float
    source: str


@dataclass(frozen=True)
class Card:
    """One form of a card.

    Attributes:
        name: what people call it.
        matches: words of the name that CUDA gives the device; all have to be in it.
        tflops: dense rates (no sparsity) by type; fp32 is that of the CUDA cores, the others are of the tensor cores
            accumulating in float32. A type without a rate is not in it.
        memory: bandwidth of the device memory.
        nvlink: to other cards, both ways together; None where that takes a bridge or the card has none.
        memory_bytes: its size without what its error correction takes; None where a card is sold with several.
    """

    name: str
    matches: tuple[str, ...]
    tflops: dict[str, Rate]
    memory: Rate
    nvlink: Rate | None = None
    memory_bytes: int | None = None


@functools.cache
def cards() -> tuple[Card, ...]:
    """All cards of the table, in its order."""
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
    16 GB keeps 1 and a L40S of 48 GB keeps 3."""
    if "memory_gb" not in row:
        return None
    nbytes = int(row["memory_gb"][0] * (1 << 30))
    return nbytes - nbytes // 16 if row.get("ecc_in_memory") else nbytes


def card_of(name: str) -> Card:
    """The card that people call `name`."""
    return next(card for card in cards() if card.name == name)


def find_card(device_name: str) -> Card | None:
    """The card that CUDA calls `device_name` (such as "NVIDIA H200"), or None for one that is not in the table.

    Every word of the name has to be accounted for, by the card, as its maker or as a memory size: an RTX 3090 Ti, a laptop's
    RTX 4090 or a MIG slice of an H100 is another card than the one whose name it begins with.
    """
    words = set(device_name.lower().replace("-", " ").split())
    for card in cards():
        parts = {part.lower() for part in card.matches}
        if parts <= words and not {word for word in words - parts - MAKER if not _SIZE.fullmatch(word)}:
            return card
    return None


LANES = 16
DTYPES = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}  # by dtype its name among a card's rates
_SEVERAL = re.compile(r"([0-9]{1,6})x-?(.+)")


@dataclass(frozen=True)
class TypicalMachine:
    """
    Attributes:
        card: its name in cards.json.
        generation: of PCI Express, with 16 lanes, as the card's datasheet says.
        host_gib: host memory for each of its GPUs. No datasheet says that: it is what PCs and rented machines with this card often have.
    """

    name: str
    card: str
    generation: int
    host_gib: int

    @property
    def link_gb_per_s(self) -> float:
        """One way, before packet headers: no copy is faster."""
        rate = link_gb_per_s(self.generation, LANES)
        assert rate is not None, "all generations are known"
        return rate

    def description(self, gpus: int = 1) -> HardwareProfile:
        """A machine with so many of its GPUs, each with a link of its own, over which they send each other what has no NVLink.

        What no datasheet says is not known: what the host takes to launch operators, what its cores multiply, pageable copies, the disk.
        """
        card = card_of(self.card)
        assert card.memory_bytes is not None, f"{card.name} has one size"
        gpu = Gpu(name=card.name, memory_bytes=card.memory_bytes, free_bytes=card.memory_bytes - CONTEXT_BYTES)
        return HardwareProfile(
            source="datasheet",
            name=f"{f'{gpus}x' if gpus > 1 else ''}{self.name}",
            gpus=(gpu,) * gpus,
            host_memory_bytes=gpus * self.host_gib << 30,
            link_gb_per_s=self.link_gb_per_s,
            peers_gb_per_s=card.nvlink.value / 2 if card.nvlink else "link",
            device_gb_per_s=card.memory.value,
            matmul_tflops=_card_tflops(card),
        )


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


def _as_printed(value: float) -> str:
    return f"{value:g}"


COLUMNS = (
    Column("name", "--machine", dtype="string", whole=True),
    Column("gpu", "GPU", dtype="string", whole=True),
    Column("memory_gib", "GPU\nGiB", _as_printed),
    Column("memory_gbps", "GPU\nGB/s", decimals(0)),
    Column("link", "link", dtype="string", whole=True),
    Column("link_gbps", "link\nGB/s", decimals(1)),
    Column("peers", "GPU to\nGPU", dtype="string"),
    Column("float16_tflops", "fp16\nTFLOP/s", _as_printed),
    Column("bfloat16_tflops", "bf16\nTFLOP/s", _as_printed),
    Column("host_gib", "assumed\nhost GiB", decimals(0), "Int64"),
)


def find_typical(name: str) -> HardwareProfile | None:
    """The machine called `name`, or with several of its GPUs (`2xrtx4090`); None where none is called so."""
    gpus, one = _split_name(name)
    found = next((each for each in TYPICAL if each.name == one), None)
    return found.description(gpus) if found is not None and 1 <= gpus <= MOST_GPUS else None


def near_names(name: str) -> list[str]:
    """Up to three that `name` may have been meant to be."""
    gpus, one = _split_name(name)
    several = f"{gpus}x" if 1 < gpus <= MOST_GPUS else ""
    return [f"{several}{near}" for near in closest(one, NAMES)]


def print_typical_machines(format: str = "table") -> None:
    """All of them with their figures, on stdout."""
    print_rows([_row(each) for each in TYPICAL], COLUMNS, format, piped_width=PIPED_WIDTH, gap=2)


def _row(machine: TypicalMachine) -> dict[str, Any]:
    found = machine.description()
    return {
        "name": machine.name,
        "gpu": machine.card,
        "memory_gib": found.gpus[0].memory_bytes / (1 << 30),
        "memory_gbps": found.device_gb_per_s,
        "link": f"PCIe {machine.generation} x{LANES}",
        "link_gbps": machine.link_gb_per_s,
        "peers": "the link" if found.peers_gb_per_s == "link" else f"{found.peers_gb_per_s:g} GB/s",
        "float16_tflops": found.matmul_tflops.get("float16"),
        "bfloat16_tflops": found.matmul_tflops.get("bfloat16"),
        "host_gib": machine.host_gib,
    }


def _card_tflops(card: Card) -> dict[str, float]:
    return {dtype: card.tflops[kind].value for dtype, kind in DTYPES.items() if kind in card.tflops}


def _split_name(name: str) -> tuple[int, str]:
    """How many GPUs, and the rest of the name as it is written here."""
    plain = name.strip().lower().replace("_", "-").replace(" ", "-")
    several = _SEVERAL.fullmatch(plain)
    return (int(several[1]), several[2]) if several else (1, plain)


# Of a GPU, left to CUDA itself: an estimate, where a measured machine has what was found.
CONTEXT_BYTES = 512 << 20
ROWS = (1, 1 << 16)  # tokens of a pass, between which an assumed rate of the cores holds
MOST_GPUS = 1024
EXAMPLE = "gpus=1x24GiB,host=128GiB,link=25GB/s"

_GPUS = re.compile(r"([0-9]{1,6})\s*[xX]\s*(.*)")


def parse_assumed(text: str, base: HardwareProfile | None = None) -> HardwareProfile:
    """The machine that `text` says, or `base` with what `text` says of it.

    Raises:
        UsageError: a part that cannot be read, or without a base one that is missing.
    """
    said = _parts(text)
    if base is None and (missing := [name for name in ("gpus", "host") if name not in said]):
        raise UsageError(f"--assume {text}: {' and '.join(missing)} missing; write it as in {EXAMPLE}.")
    if base is None:
        start = HardwareProfile(source="assumed", name="a machine that is not there", gpus=(), host_memory_bytes=0)
    else:
        start = _without_other_device(base, said.get("gpus")).model_copy(update={"name": f"{base.name} with {text}"})
    changes = {_FIELDS[name]: value for name, value in said.items() if name in _FIELDS}
    if "matmul" in said:
        changes["matmul_tflops"] = dict.fromkeys(("float16", "bfloat16"), said["matmul"])
    if "memory" in said:  # these were measured with another
        changes |= {"device_products": (), "engine_overheads": (), "loading": None}
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


def _source(base: HardwareProfile, said: dict[str, Any]) -> Source:
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


def _without_other_device(base: HardwareProfile, gpus: tuple[Gpu, ...] | None) -> HardwareProfile:
    """Without the rates of its device where that becomes a GPU or stops being one."""
    if gpus is None or bool(gpus) == bool(base.gpus):
        return base
    copies = "link_gb_per_s", "pageable_link_gb_per_s", "peers_gb_per_s", "device_gb_per_s"
    gone = dict.fromkeys((*copies, "cores", "launches", "loading", "process_bytes"))
    none = {
        "matmul_tflops": {},
        "device_products": (),
        "engine_overheads": (),
        "measuring_bytes": 0,
        "library_bytes": {},
    }
    return base.model_copy(update={**gone, **none})


def _beside(cores: CpuProfile, times: float) -> CpuProfile:
    """The same beside a link that is so many times as fast, and gives up the same share to them."""
    products = tuple(each.model_copy(update={"link_gb_per_s": each.link_gb_per_s * times}) for each in cores.products)
    return cores.model_copy(update={"products": products})


def _cores(gb_per_s: float, machine: HardwareProfile) -> CpuProfile:
    """Cores that read and multiply at one rate, whatever the format and however few the tokens, beside a link that they do not slow."""
    link_gb_per_s = machine.link_gb_per_s
    if link_gb_per_s is None or machine.device_gb_per_s is None:
        missing = "link" if link_gb_per_s is None else "memory"
        raise UsageError(
            f"--assume cores: their share of the work depends on {missing}, whose rate is not known; add {missing}=."
        )
    rates = [
        CpuProductRate(
            format=kind,
            rows=rows,
            link_gb_per_s=link_gb_per_s,
            cores_gb_per_s=gb_per_s,
            cores_alone_gb_per_s=gb_per_s,
            hand_off_s=0.0,
        )
        for kind in get_args(WeightFormat)
        for rows in ROWS
    ]
    return CpuProfile(threads=1, instructions="", read_gb_per_s=gb_per_s, products=tuple(rates))


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


def resolve_profile(name: str | None, assume: str | None) -> HardwareProfile | None:
    """Return the machine that was named or assumed, or None for this one. Imports no torch, so a bad line is refused at once.

    Args:
        name: of a file with a description, or of a typical machine, as `--machine` names it.
        assume: what is said of a machine, see `assume.assumed`.

    Raises:
        UsageError: there is no such machine, or the file or the line says something that cannot be.
    """
    if name is None and assume is None:
        return None

    found = None if name is None else _named(name)
    return found if assume is None else parse_assumed(assume, found)


def _named(name: str) -> HardwareProfile:
    """A file that is there is taken first; then a typical machine of that name."""
    from zero_inference.hardware.profile import read_profile

    path = Path(os.path.expanduser(name))
    if not os.path.lexists(path) and (typical := find_typical(name)) is not None:
        return typical
    if os.path.lexists(path) or os.sep in name or path.suffix:
        return read_profile(path)
    near = near_names(name)
    meant = f" (did you mean {', '.join(near)}?)" if near else ""
    raise UsageError(
        f"--machine {name}: no such file, and no typical machine of that name{meant}. There are {', '.join(NAMES)}, with several GPUs as "
        f"in 2x{NAMES[0]}; zero-inference link --save FILE writes a file."
    )
