"""Machines that many people have or rent, by name: what the datasheets of their GPUs say, and a host of a size that is common for them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from zero_inference.hardware.assume import CONTEXT_BYTES, MOST_GPUS
from zero_inference.hardware.cards import Card, card_of
from zero_inference.hardware.description import Description, Gpu
from zero_inference.hardware.system import link_gb_per_s
from zero_inference.utils.format import decimals
from zero_inference.utils.suggestions import closest
from zero_inference.utils.tables import PIPED_WIDTH, Column, print_rows

LANES = 16
DTYPES = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}  # by dtype its name among a card's rates
_SEVERAL = re.compile(r"([0-9]{1,6})x-?(.+)")


@dataclass(frozen=True)
class Typical:
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

    def description(self, gpus: int = 1) -> Description:
        """A machine with so many of its GPUs, each with a link of its own, over which they send each other what has no NVLink.

        What no datasheet says is not known: what the host takes to launch operators, what its cores multiply, pageable copies, the disk.
        """
        card = card_of(self.card)
        assert card.memory_bytes is not None, f"{card.name} has one size"
        gpu = Gpu(name=card.name, memory_bytes=card.memory_bytes, free_bytes=card.memory_bytes - CONTEXT_BYTES)
        return Description(
            source="datasheet",
            name=f"{f'{gpus}x' if gpus > 1 else ''}{self.name}",
            gpus=(gpu,) * gpus,
            host_memory_bytes=gpus * self.host_gib << 30,
            link_gb_per_s=self.link_gb_per_s,
            peers_gb_per_s=card.nvlink.value / 2 if card.nvlink else "link",
            device_gb_per_s=card.memory.value,
            matmul_tflops=_tflops(card),
        )


TYPICAL = (
    Typical("rtx3090", "RTX 3090", 4, 64),
    Typical("rtx4090", "RTX 4090", 4, 64),
    Typical("rtx5090", "RTX 5090", 5, 64),
    Typical("rtx-a6000", "RTX A6000", 4, 128),
    Typical("t4", "T4", 3, 64),
    Typical("l4", "L4", 4, 64),
    Typical("a10", "A10", 4, 64),
    Typical("l40s", "L40S", 4, 128),
    Typical("a100-40", "A100 SXM 40 GB", 4, 128),
    Typical("a100-80", "A100 SXM 80 GB", 4, 256),
    Typical("a100-80-pcie", "A100 PCIe 80 GB", 4, 256),
    Typical("h100-pcie", "H100 PCIe", 5, 256),
    Typical("h100-nvl", "H100 NVL", 5, 256),
    Typical("h100-sxm", "H100 SXM", 5, 256),
    Typical("h200-sxm", "H200 SXM", 5, 256),
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


def find_typical(name: str) -> Description | None:
    """The machine called `name`, or with several of its GPUs (`2xrtx4090`); None where none is called so."""
    gpus, one = _parts(name)
    found = next((each for each in TYPICAL if each.name == one), None)
    return found.description(gpus) if found is not None and 1 <= gpus <= MOST_GPUS else None


def near_names(name: str) -> list[str]:
    """Up to three that `name` may have been meant to be."""
    gpus, one = _parts(name)
    several = f"{gpus}x" if 1 < gpus <= MOST_GPUS else ""
    return [f"{several}{near}" for near in closest(one, NAMES)]


def print_typical(format: str = "table") -> None:
    """All of them with their figures, on stdout."""
    print_rows([_row(each) for each in TYPICAL], COLUMNS, format, piped_width=PIPED_WIDTH, gap=2)


def _row(machine: Typical) -> dict[str, Any]:
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


def _tflops(card: Card) -> dict[str, float]:
    return {dtype: card.tflops[kind].value for dtype, kind in DTYPES.items() if kind in card.tflops}


def _parts(name: str) -> tuple[int, str]:
    """How many GPUs, and the rest of the name as it is written here."""
    plain = name.strip().lower().replace("_", "-").replace(" ", "-")
    several = _SEVERAL.fullmatch(plain)
    return (int(several[1]), several[2]) if several else (1, plain)
