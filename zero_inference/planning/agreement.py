"""What must be identical on all ranks of a run: ranks that differ wait for each other, or mix two models into one result."""

from __future__ import annotations

import hashlib
import json
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

# Names of files, which each node may have elsewhere; what is in them is compared where it matters. `verbose` is of one rank alone.
OF_A_RANK = (*PATHS, "verbose")
SAMPLE_BYTES = 1 << 16


def refuse_other_requests(config: RunConfig, spec: ModelSpec, ranks: Ranks, questions: dict[str, list[dict]]) -> None:
    """To be called by all ranks alike, before they decide or load anything.

    Raises:
        UsageError: on all ranks, where options, model, versions or devices differ.
    """
    _refuse_differences(
        ranks,
        lambda: {
            **{
                f"--{name.replace('_', '-')}": value
                for name, value in config.as_dict().items()
                if name not in OF_A_RANK
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
    """The same for the prompts `ids` and the files of the weights: their names and sizes, and samples of what is in them."""
    _refuse_differences(
        ranks,
        lambda: {
            "the prompts": hashlib.sha256(ids.numpy().tobytes()).hexdigest()[:12],
            "the weights": None
            if spec.dummy
            else _digest([_sample(path) for path in checkpoint_files(spec.checkpoint_folder())]),
        },
    )


def _refuse_differences(ranks: Ranks, describe) -> None:
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
    """A safetensors file has its table of contents at its start, so this is more than its first tensor."""
    with open(path, "rb") as file:
        first = file.read(SAMPLE_BYTES)
        size = file.seek(0, 2)
        file.seek(max(0, size - SAMPLE_BYTES))
        return [path.name, size, hashlib.sha256(first + file.read()).hexdigest()]


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:12]
