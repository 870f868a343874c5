"""Every weight on the device: the check of the tokens, and the speed to compare with where a model fits."""

from __future__ import annotations

from collections.abc import Callable

import torch

from zero_inference.config import RunConfig
from zero_inference.engines.base import Footprint, LoadedModel, parameter_bytes
from zero_inference.models.checkpoint import load_weights
from zero_inference.models.skeleton import empty_model
from zero_inference.models.spec import ModelSpec
from zero_inference.runtime.distributed import Ranks


def check(config: RunConfig, spec: ModelSpec, ranks: Ranks) -> None:
    """Nothing beyond what every engine needs: that transformers can build the model."""
    _ = spec.outline


def load(
    config: RunConfig, spec: ModelSpec, ranks: Ranks, progress: Callable[[int], None] = lambda done: None
) -> LoadedModel:
    """Each rank holds the whole model and its share of the batch."""
    model = empty_model(spec)

    def adopt(name: str, parameter: torch.nn.Parameter) -> None:
        parameter.data = parameter.data.to(ranks.device)

    load_weights(model, spec, config.seed, ranks.device, adopt, progress)
    model.to(ranks.device)  # buffers
    return LoadedModel(model=model, device=ranks.device, dtype=spec.dtype, weight_bytes=parameter_bytes(model))


def footprint(config: RunConfig, spec: ModelSpec, ranks: Ranks, model) -> Footprint:
    return Footprint(device=parameter_bytes(model))
