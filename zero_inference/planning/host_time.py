"""How long a pass keeps the host: launching operators, calling modules, and what an engine does for each piece of weights or layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from zero_inference.engines.base import EnginePlan
from zero_inference.hardware.rates import attending, copying, own_work, restoring

if TYPE_CHECKING:
    from zero_inference.hardware.description import Description, OwnWork

# Runs launch operators this many times as slowly as the small models of `link --save` do: the median of the committed runs that wait
# for the host (13B and 8B in 16 bits on an H100: 1.46 and 1.46; OPT-13B on seven H200 hosts: 0.96 to 2.0). Why is not known, and hosts
# differ from minute to minute.
LAUNCH_SLOWNESS = 1.4


@dataclass(frozen=True)
class HostWork:
    """Of a pass.

    Attributes:
        launches, module_calls: operators that the host launches, and its calls of modules; none where the device repeats graphs.
        restored: operators that restore weights from codes.
        pieces: of weights that it sends for.
        starts: a generation begins with it.
    """

    launches: int = 0
    module_calls: int = 0
    restored: int = 0
    pieces: int = 0
    starts: bool = False


def host_work_s(plan: EnginePlan, description: Description, host: HostWork) -> float:
    """Without selecting a token. The host of a machine that nobody measured is taken to be never late."""
    launches, config = description.launches, plan.job.config
    of_model_s = host.launches * launches.operator_s + host.module_calls * launches.module_s if launches else 0.0
    of_model_s *= 1 + host.restored / max(
        1, host.launches
    )  # one of these counts as the mean of the others, as in `prefill_piece_s`
    found = of_model_s * (LAUNCH_SLOWNESS if plan.job.on_gpu else 1.0)
    found += host.pieces * piece_s(own_work(description, config.engine, config.quant_bits), host)
    found += plan.attending_layers * piece_s(attending(description), host)
    found += plan.copied_layers * piece_s(copying(description), host)
    if host.starts or not plan.graphs:
        found += plan.restored_blocks * piece_s(restoring(description), host)
    return found


def piece_s(own: OwnWork | None, host: HostWork) -> float:
    """Of the host for a piece of weights, or a layer whose keys and values are in host memory."""
    if own is None:
        return 0.0
    return own.prefill_piece_s if host.starts else own.step_piece_s
