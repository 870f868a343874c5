"""What a plan says to people: where the weights are and what a decode step moves."""

from __future__ import annotations

from typing import Any

from zero_inference.engines.use import UseOfMachine
from zero_inference.utils.format import format_bytes


class PlanInWords(UseOfMachine):
    """What holds of most engines; others say where they differ.

    Attributes:
        footprint, disk_bytes: see `EnginePlan`.
    """

    footprint: Any
    disk_bytes: int

    def in_words(self) -> list[str]:
        """Lines about what a decode step moves and who computes it; none where there is nothing to tell."""
        if not self.fetched_bytes:
            return []
        disk = f"{format_bytes(self.disk_bytes)} {{}}from disk" if self.disk_bytes else ""
        if not (self.job.on_gpu or self.copies_on_cpu):  # weights in host memory are used where they are
            return [f"each decode step reads {disk.format('')}"] if disk else []
        return [f"each decode step {self.fetched_in_words()}{', ' * bool(disk)}{disk.format('of it ')}"]

    def dequantized_in_words(self) -> list[str]:
        """A line about a CPU that dequantizes weights in every step; none elsewhere."""
        if not self.dequantizes_on_cpu:
            return []
        other = "" if self.job.config.engine == "stream" else "; --engine stream multiplies them as stored"
        return [f"without a GPU, weights are dequantized in every step: slower than 16 bits{other}"]

    def fetched_in_words(self) -> str:
        """`copies 20.4 GiB over the link`."""
        fetched = format_bytes(self.fetched_bytes) if self.fetched_bytes else "nothing"
        return f"copies {fetched} {'over the link' if self.job.on_gpu else 'within host memory'}"

    def places_in_words(self) -> str:
        """Where the weights are."""
        if self.footprint.disk:
            return "on disk"
        return "in host memory" if self.footprint.host or not self.job.on_gpu else "on the device"
