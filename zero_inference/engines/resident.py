"""Every weight on the device: the check of the tokens, and the speed to compare with where a model fits."""

from __future__ import annotations

import torch

from zero_inference.engines.base import EnginePlan, Footprint, Job, LoadedModel, Progress, no_communicator
from zero_inference.models.sizes import parameter_bytes
from zero_inference.models.weights import load_weights

connect = no_communicator


def plan(job: Job) -> EnginePlan:
    """Each rank holds the whole model and its share of the batch."""
    total = job.sizes.parameter_bytes
    return EnginePlan(job, Footprint(device=total), pinned=False, weight_bytes=total)


def check(plan: EnginePlan) -> None:
    """Nothing beyond what every engine needs."""


def load(plan: EnginePlan, progress: Progress = lambda done: None) -> LoadedModel:
    """Put each weight on the device as it is read."""
    job, model = plan.job, plan.job.empty_model.model
    device = job.ranks.device

    def adopt(name: str, parameter: torch.nn.Parameter) -> None:
        parameter.data = parameter.data.to(device)

    load_weights(model, job.spec, job.config.seed, device, adopt, progress)
    model.to(device)  # buffers
    return LoadedModel(model=model, device=device, dtype=job.spec.dtype, weight_bytes=parameter_bytes(model))
