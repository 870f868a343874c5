"""All weights on the device: the reference for tokens and, if the model fits, for speed."""

from __future__ import annotations

import torch

from zero_inference.engines.base import EnginePlan, Footprint, Job, LoadedModel, LoadProgress
from zero_inference.models.empty_model import parameter_bytes
from zero_inference.models.weights import load_weights


def plan(job: Job) -> EnginePlan:
    """Plan the whole model on each rank, with its share of the batch."""
    total = job.sizes.parameter_bytes
    return EnginePlan(job, Footprint(device=total), pinned=False, weight_bytes=total)


def check(plan: EnginePlan) -> None:
    """Check nothing."""


def load(plan: EnginePlan, progress: LoadProgress = lambda done: None) -> LoadedModel:
    """Copy each weight to the device as it is read."""
    job, model = plan.job, plan.job.empty_model.model
    device = job.ranks.device

    def adopt(name: str, parameter: torch.nn.Parameter) -> None:
        parameter.data = parameter.data.to(device)

    load_weights(model, job.spec, job.config.seed, device, adopt, progress)
    model.to(device)  # buffers
    return LoadedModel(model=model, device=device, dtype=job.spec.dtype, weight_bytes=parameter_bytes(model))
