"""Cost terms: the facts about an engine and its plan that the cost model (planning/cost.py) counts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class CpuWork(NamedTuple):
    """Work of the CPU backend in one pass.

    Attributes:
        layer_share, expert_share: share (0 to 1) of the bytes of decoder layers without experts, and of experts, that it multiplies.
    """

    layer_share: float = 0.0
    expert_share: float = 0.0
    wait_s: float = 0.0  # seconds that the device waits for it


@dataclass(frozen=True)
class CostTerms:
    """The defaults are an engine that copies what it needs while the device computes everything.

    Attributes:
        prefill_link_gb_per_s: rate of the link in a prefill; None where it is the rate of plain copies.
        link_beside_cpu_gb_per_s, cpu_beside_link_gb_per_s: rates of all links and of the CPU while both work in a step; None where the
            CPU backend is not used.
        overhead_negligible: hooks and dequantization may be left out where they were not measured; otherwise times are lower bounds.
        head_plain_bytes, head_stored_bytes: an output head that is quantized on its own, in the model's dtype and as stored.
        step_cpu, prefill_cpu: work of the CPU backend in a decode step and in a prefill.
        cpu_rate_unknown: a run would use the CPU backend, but its rate is unknown, so the plan leaves it out.
    """

    prefill_fetched_bytes: int  # bytes of weights that a prefill copies to the devices, over all ranks
    chosen_expert_bytes: int = 0  # part of a step's fetched bytes that are experts which tokens chose
    prefill_link_gb_per_s: float | None = None
    link_beside_cpu_gb_per_s: float | None = None
    cpu_beside_link_gb_per_s: float | None = None
    copies_overlap: bool = True  # the device computes while weights are copied
    copies_wait_for_host: bool = False  # the host requests the next copies only after it has seen the last ones arrive
    copies_within_host: bool = False  # without a GPU, weights in host memory are copied before use
    fetches: int = 0  # copies of weights that the host requests in a pass, one by one
    resident_quantized_blocks: int = 0  # quantized blocks on the device; the host launches operators for each of them
    graphs: bool = False  # decode steps are CUDA graphs, so the host launches no operators
    overhead_negligible: bool = True
    fused_rows: int = 0  # most tokens that the device multiplies with codes directly; for more it dequantizes first
    head_plain_bytes: int = 0
    head_stored_bytes: int = 0
    quantizes_all: bool = False  # embedding and head are quantized with the layers
    dequantizes_on_cpu: bool = False  # without a GPU, weights are dequantized in each pass
    step_cpu: CpuWork = CpuWork()
    prefill_cpu: CpuWork = CpuWork()
    cpu_attention_layers: int = 0  # layers whose attention the CPU computes
    cpu_alone_s: float = 0.0  # seconds of the CPU's products of a step while the link is idle; 0 where unknown
    cpu_rate_unknown: bool = False
    depends_on_routing: bool = False  # the bytes that a step moves depend on the experts that tokens choose
