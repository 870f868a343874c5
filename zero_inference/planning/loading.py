"""How long loading will take: what is read or drawn, quantized and put into host memory, one after the other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zero_inference.engines.base import EnginePlan
from zero_inference.hardware.rates import own_work
from zero_inference.models.alike import COMPARED_BYTES, compared_layers

if TYPE_CHECKING:
    from zero_inference.hardware.description import Description, Loading

# Copies of decoder layers in 16 bits from a GPU to new host memory, where they are kept to be compared, in huge pages that all threads
# fault in: 1.8 to 14 GB/s in 18 of 20 runs of the stream engine on an H100 (h100-readme), 0.8 to 1.45 before (h100-predicted).
COMPARED_GB_PER_S = 4.0


def predicted_load_s(plan: EnginePlan, description: Description) -> float | None:
    """Seconds from the first weight to the last of one rank; None where a rate is missing, as the disk's for a checkpoint, and where
    weights are written to a disk: how fast it writes is not measured.

    A checkpoint is taken to lie on the disk that was measured, and not in the system's cache. Quantizing takes what this package's own
    operator takes, whichever engine does it.
    """
    job, config, rates = plan.job, plan.job.config, description.loading
    source = _source_gb_per_s(plan, description)
    if rates is None or source is None or plan.footprint.disk:
        return None
    dense = job.sizes.parameter_bytes
    parts = [dense / source, plan.footprint.host / rates.keep_gb_per_s]
    if config.quantized:
        parts.append(dense / _quantize_gb_per_s(rates, config.quant_bits))
    own = own_work(description, config.engine, config.quant_bits)
    layers = job.spec.text_config.num_hidden_layers
    return sum(parts) / 1e9 + compared_s(plan) + (own.load_s + layers * own.load_layer_s if own else 0.0)


def compared_s(plan: EnginePlan) -> float:
    """Return the seconds in which a GPU's copies of the decoder layers that are compared come to host memory."""
    job = plan.job
    layers = job.skeleton.once("bytes of compared layers", lambda: compared_layers(job.skeleton.model))
    return min(COMPARED_BYTES, sum(layers.values())) / (COMPARED_GB_PER_S * 1e9) if job.on_gpu else 0.0


def _source_gb_per_s(plan: EnginePlan, description: Description) -> float | None:
    """Of a weight that comes to where it is quantized."""
    job, rates = plan.job, description.loading
    if rates is None:
        return None
    if job.config.dummy:
        return rates.draw_gb_per_s
    if description.disk_gb_per_s is None:
        return None
    to_device = description.pageable_link_gb_per_s if job.on_gpu else None
    return 1 / (1 / description.disk_gb_per_s + (1 / to_device if to_device else 0.0))


def _quantize_gb_per_s(rates: Loading, quant_bits: int) -> float:
    return rates.quantize_int8_gb_per_s if quant_bits == 8 else rates.quantize_int4_gb_per_s
