"""Advice on a faster run, from the measurements of one."""

from __future__ import annotations

from zero_inference.config.options import QUANT_BITS, QUANTIZING_ENGINES
from zero_inference.records.hardware import LinkUse
from zero_inference.records.schema import Measured, Request
from zero_inference.utils.format import three_digits

NEAR_THE_LIMIT = 0.9  # from here on only less work helps
FAR_FROM_THE_LIMIT = 0.7
BUSY = {
    "link": "the link sets the speed",
    "link_and_cores": "link and cores set the speed",
    "disk": "the disk sets the speed",
    "device_memory": "reading device memory sets the speed",
}


def advice(request: Request, measured: Measured) -> list[str]:
    """Return lines to print below the limit; none if the record does not show what would help."""
    limit, on_gpu = measured.limit, measured.device == "cuda"
    share, bound = limit.fraction_of_limit, limit.bound_by
    if share is None or bound not in BUSY or not on_gpu:
        return []
    lines = []
    if bound == "link" and request.cpu_offload and request.pin_memory is False:
        lines.append("weights in host memory are not page-locked: --pin-memory 1 copies faster")
    if share >= NEAR_THE_LIMIT:
        use = measured.link_use
        busy = f"the link is busy {use.busy_share:.0%} of the time" if isinstance(use, LinkUse) else BUSY["link"]
        options = _options_for_fewer_bytes(request, bound)
        lines.append(
            f"{busy if bound == 'link' else BUSY[bound]}; only fewer bytes a token help: {' or '.join(options)}"
            if options
            else f"{busy if bound == 'link' else BUSY[bound]}"
        )
    elif share < FAR_FROM_THE_LIMIT and bound == "link" and request.engine in ("deepspeed", "accelerate"):
        lines.append(f"{1 - share:.0%} of the link's speed is unused: --engine stream copies while it computes")
    return lines


def advice_far_from_limit(request: Request, measured: Measured) -> list[str]:
    """Return a line about a step that takes much longer than reading weights and KV cache, or than its products; else nothing."""
    limit, steps = measured.limit, len(measured.loops[-1].step_s)
    share = limit.fraction_of_limit
    floors = {
        "device_memory": ("reading weights and KV cache takes", limit.floor_step_s.device_memory),
        "matmul": ("matrix products take", limit.floor_step_s.matmul),
    }
    if share is None or share >= FAR_FROM_THE_LIMIT or limit.bound_by not in floors:
        return []
    if request.batch_size > 1 and limit.bound_by == "device_memory" and measured.decode_weights_gb_per_s is None:
        return [
            f"the limit counts the experts of one token; {request.batch_size} tokens choose more, which are read as well"
        ]
    what, floor_s = floors[limit.bound_by]
    if not steps or floor_s is None:
        return []
    step_s, whole = measured.decode_latency_s / steps, request.engine in ("deepspeed", "accelerate")
    fetched = (
        ", and fetching weights module by module" if whole and measured.transfers.host_to_device_bytes_per_step else ""
    )
    rest = "starting operators" if limit.bound_by == "matmul" else "computing and starting operators"
    return [
        f"{what} {three_digits(1e3 * floor_s)} of the {three_digits(1e3 * step_s)} ms of a step; the rest is "
        f"{rest}{fetched}, which a larger --batch-size shares"
    ]


def _options_for_fewer_bytes(request: Request, bound: str) -> list[str]:
    """Return options that move fewer bytes for each token."""
    options = []
    if request.engine in QUANTIZING_ENGINES and request.quant_bits > min(QUANT_BITS):
        options.append(f"--quant-bits {min(QUANT_BITS)}")
    if (
        request.engine == "stream"
        and bound == "link"
        and request.cpu_compute in ("off", "0")
        and request.world_size == 1
    ):
        options.append("--cpu-compute auto")
    if bound == "disk":
        options.append("--cpu-offload (if host memory is large enough)")
    if not request.kv_offload:  # else the bytes of keys and values grow with it
        options.append("a larger --batch-size")
    return options
