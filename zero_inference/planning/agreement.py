"""Checks that all ranks have the same request and inputs: ranks that differ wait for each other, or mix two models into one result."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from zero_inference.config.options import PATHS
from zero_inference.config.run_config import RunConfig
from zero_inference.engines.deepspeed.config import read_ds_config
from zero_inference.errors import UsageError
from zero_inference.models.checkpoint_files import checkpoint_files
from zero_inference.models.spec import ModelSpec
from zero_inference.utils.environment import package_versions
from zero_inference.utils.ranks import Ranks

# Paths may differ from node to node; the content of the files is compared where it matters.
NOT_COMPARED = (*PATHS, "verbose")
SAMPLE_BYTES = 1 << 16


def refuse_other_requests(config: RunConfig, spec: ModelSpec, ranks: Ranks, questions: dict[str, list[dict]]) -> None:
    """Compare options, model, versions and devices of all ranks before they plan: a collective.

    Raises:
        UsageError: on all ranks, where these differ.
    """
    _refuse_differences(
        ranks,
        lambda: {
            **{
                f"--{name.replace('_', '-')}": value
                for name, value in config.as_dict().items()
                if name not in NOT_COMPARED
            },
            "--trace": bool(config.trace),
            "--ds-config": read_ds_config(config.ds_config),
            "the device": ranks.device.type,
            "the dtype": str(spec.dtype),
            "the model's config": _digest(spec.config.to_dict() | {"_name_or_path": None}),
            "--quality-data": _digest(questions),
            **package_versions(),
        },
    )


def refuse_other_inputs(spec: ModelSpec, ranks: Ranks, ids: torch.Tensor) -> None:
    """Compare the prompts `ids` and the files of the weights (names, sizes and samples) of all ranks: a collective.

    Raises:
        UsageError: on all ranks, where these differ.
    """
    _refuse_differences(
        ranks,
        lambda: {
            "the prompts": hashlib.sha256(ids.numpy().tobytes()).hexdigest()[:12],
            "the weights": None
            if spec.dummy
            else _digest([_sample(path) for path in checkpoint_files(spec.checkpoint_folder())]),
        },
    )


def _refuse_differences(ranks: Ranks, describe: Callable[[], dict[str, Any]]) -> None:
    if ranks.world_size == 1:
        return
    first, *others = ranks.gather_objects(describe())
    for rank, other in enumerate(others, 1):
        for name, value in first.items():
            if other.get(name) != value:
                raise UsageError(
                    f"rank 0 has {name} {value!s:.60} and rank {rank} has {other.get(name)!s:.60}: the ranks of a run "
                    "must have the same options, model, prompts and versions."
                )


def _sample(path: Path) -> list:
    """Return name, size and a hash of both ends; the start of a safetensors file has its table of contents."""
    with open(path, "rb") as file:
        first = file.read(SAMPLE_BYTES)
        size = file.seek(0, 2)
        file.seek(max(0, size - SAMPLE_BYTES))
        return [path.name, size, hashlib.sha256(first + file.read()).hexdigest()]


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:12]
