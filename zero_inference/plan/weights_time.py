"""How long the weights of an operator keep the device: read as they are stored, restored where they are quantized, and multiplied."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from zero_inference.engines.base import EnginePlan
from zero_inference.machine.rates import own_work, product_gb_per_s, restored_gb_per_s
from zero_inference.models.operators import Operator, Pass
from zero_inference.models.sizes import experts_of

if TYPE_CHECKING:
    from zero_inference.link.description import Description


def weights_s_of(
    plan: EnginePlan, description: Description, traced: Pass, tokens: int, of_cores: tuple[float, float]
) -> Callable[[Operator], float]:
    """Seconds in which the device brings the weights of an operator from its memory, without those that the cores multiply.

    Codes are multiplied as they are by an engine that can do so with so many tokens, or as it was measured with them; else the dtype that
    is multiplied is restored first: written once and read once.
    """
    job, config = plan.job, plan.job.config
    number, chosen = experts_of(job.spec)
    read = 1 - (1 - chosen / number) ** tokens if number else 0.0
    in_layers = traced.total("layer_bytes") + traced.total("expert_bytes")
    if plan.quantizes_all:
        stored = plan.weight_bytes / max(1, job.sizes.parameter_bytes)
    else:
        stored = (plan.weight_bytes - (job.sizes.parameter_bytes - in_layers)) / max(1, in_layers)
    memory = description.device_gb_per_s or float("inf")
    plain = job.spec.dtype_name
    kind = f"int{config.quant_bits}" if config.quantized else plain
    codes = config.quantized and job.on_gpu
    restored = restored_gb_per_s(own_work(description, config.engine, config.quant_bits), plain)

    def rate(what: str, rows: int) -> float | None:
        return product_gb_per_s(description, what, rows)

    def of_byte(rows: int) -> float:
        """1e-9 seconds for a byte of the dtype that is multiplied, of a weight that `rows` tokens use."""
        product = 1 / (rate(plain, rows) or memory)
        if restored:  # with the product of one token
            return 1 / restored + max(0.0, product - 1 / (rate(plain, 1) or memory))
        if (found := rate(kind, rows)) and (plan.fused_rows or not codes):
            return stored / found
        if not codes or rows <= plan.fused_rows:
            return stored / memory
        return (stored + 1) / memory + product

    of_expert = max(1, round(tokens * chosen / number)) if number else tokens  # tokens that one expert gets
    layer_cost, expert_cost = of_byte(tokens), of_byte(of_expert)
    outside_cost = layer_cost if plan.quantizes_all else 1 / (rate(plain, tokens) or memory)

    def seconds(operator: Operator) -> float:
        layers = (1 - of_cores[0]) * operator.layer_bytes * layer_cost
        experts = (1 - of_cores[1]) * read * operator.expert_bytes * expert_cost
        return (operator.outside_bytes * outside_cost + layers + experts) / 1e9

    return seconds
