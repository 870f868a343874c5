"""How long the weights of an operator keep the device: read as they are stored, restored where they are quantized, and multiplied."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from zero_inference.engines.base import EnginePlan
from zero_inference.hardware.rates import own_work, product_time, restored_gb_per_s
from zero_inference.kernels.indexed import pairs_together
from zero_inference.models.operators import Operator, Pass

if TYPE_CHECKING:
    from zero_inference.hardware.description import Description

DEQUANTIZED_ROWS = (
    128  # of hardware/compute.py's measurements of a CPU, tokens that are multiplied with restored weights
)


def weights_s_of(
    plan: EnginePlan, description: Description, traced: Pass, tokens: int, of_cores: tuple[float, float]
) -> Callable[[Operator], float]:
    """Seconds in which the device brings the weights of an operator from its memory, without those that the cores multiply.

    Codes are multiplied as they are by an engine that can do so with so many tokens, or as it was measured with them; else the dtype that
    is multiplied is restored first: written once and read once. On a CPU that takes longer than the product, and all experts of a layer.
    """
    job, config = plan.job, plan.job.config
    number, chosen = job.spec.experts
    of_token = chosen / number if number else 0.0  # of the experts
    fused = config.quantized and tokens <= plan.fused_rows
    together = pairs_together(tokens * chosen, number) if number and fused else max(1, tokens)
    read = mean_reads(tokens, of_token, together)
    plain_head, stored_head = plan.head_bytes
    in_layers = traced.total("layer_bytes") + traced.total("expert_bytes")
    if plan.quantizes_all:
        stored = plan.weight_bytes / max(1, job.sizes.parameter_bytes)
    else:
        others = job.sizes.parameter_bytes - in_layers - plain_head + stored_head
        stored = (plan.weight_bytes - others) / max(1, in_layers)
    memory = description.device_gb_per_s or float("inf")
    plain = job.spec.dtype_name
    kind = f"int{config.quant_bits}" if config.quantized else plain
    codes = config.quantized and job.on_gpu
    restored = restored_gb_per_s(own_work(description, config.engine, config.quant_bits), plain)

    dequantizes = plan.dequantizes_on_cpu and not restored
    dequantized = dequantized_byte_ns(description, kind, plain, stored) if dequantizes else 0.0

    def of_plain(rows: int) -> tuple[float, float]:
        """1e-9 seconds for a byte, and seconds besides, of a weight that `rows` tokens use."""
        found = product_time(description, plain, rows)
        return (1 / memory, 0.0) if found is None else (1 / found.gb_per_s, found.call_s)

    def of_weight(rows: int) -> tuple[float, float]:
        """The same of one that is stored as the engine does, for bytes of the dtype that is multiplied."""
        product, call_s = of_plain(rows)
        if dequantizes:  # whatever is chosen, below
            return product, call_s
        if restored:  # with the product of one token
            return 1 / restored + max(0.0, product - of_plain(1)[0]), 0.0
        if (found := product_time(description, kind, rows)) and (plan.fused_rows or not codes):
            return stored / found.gb_per_s, found.call_s
        if not codes or rows <= plan.fused_rows:
            return stored / memory, 0.0
        return (stored + 1) / memory + product, call_s

    of_expert = max(1, round(tokens * of_token / read)) if number else tokens  # tokens that one expert gets at once
    if codes and not fused:  # all experts are restored first, however few tokens one gets
        of_expert = max(of_expert, plan.fused_rows + 1)
    of_layers, of_experts = of_weight(tokens), of_weight(of_expert)
    outside = of_layers if plan.quantizes_all else of_plain(tokens)

    def of_head() -> tuple[float, float]:
        """As `of_weight`, of a head that is quantized by itself, which multiplies the last token of each sequence."""
        rows, share = job.rank_batch, stored_head / plain_head
        if (found := product_time(description, "int8", rows)) and (plan.fused_rows or not codes):
            return share / found.gb_per_s, found.call_s
        restores = (1.0, of_plain(rows)[0]) if rows > plan.fused_rows and job.on_gpu else (0.0, 0.0)
        return (share + restores[0]) / memory + restores[1], 0.0

    head = of_head() if plain_head else outside

    def seconds(operator: Operator) -> float:
        calls = bool(operator.flops) and not (fused and operator.same_input)  # of a kernel of its own
        is_head = operator.flops > 0 and 0 < plain_head <= operator.outside_bytes
        parts = (
            (1.0, operator.outside_bytes, 1.0, head if is_head else outside),
            (1 - of_cores[0], operator.layer_bytes, 1.0, of_layers),
            (1 - of_cores[1], operator.expert_bytes, read, of_experts),  # by one kernel, whichever are chosen
        )
        products_s = sum(
            share * (used * nbytes * byte_ns / 1e9 + calls * call_s)
            for share, nbytes, used, (byte_ns, call_s) in parts
            if nbytes
        )
        return products_s + dequantized * (operator.layer_bytes + operator.expert_bytes) / 1e9

    return seconds


def dequantized_byte_ns(description: Description, kind: str, plain: str, stored: float) -> float:
    """Return 1e-9 seconds in which a CPU dequantizes a byte of a weight in the dtype `plain`: what a product with codes takes longer than
    one with plain weights, of more tokens than are multiplied with codes; by bytes where that was not measured.

    Args:
        kind: "int8" or "int4".
        stored: bytes of codes and scales for a byte.
    """
    found = product_time(description, kind, DEQUANTIZED_ROWS)
    product = product_time(description, plain, DEQUANTIZED_ROWS)
    if found is None or product is None:
        return (stored + 1) / (description.device_gb_per_s or float("inf"))
    return max(0.0, stored / found.gb_per_s - 1 / product.gb_per_s)


def mean_reads(tokens: int, share: float, together: int) -> float:
    """How often a weight is read on average that each of `tokens` tokens uses with probability `share`, once for every `together` of those
    that do: the mean of ceil(k / together) for a binomial k."""
    if together >= tokens:
        return 1 - (1 - share) ** tokens
    return sum(
        math.comb(tokens, k) * share**k * (1 - share) ** (tokens - k) * math.ceil(k / together)
        for k in range(1, tokens + 1)
    )
