"""What can be refused before anything is built: by the launch alone, and by the model's config."""

from __future__ import annotations

from zero_inference.config.checks import batch_advice
from zero_inference.config.options import DEFAULTS
from zero_inference.config.run_config import RunConfig
from zero_inference.errors import UsageError
from zero_inference.hardware.machine import Machine
from zero_inference.models.spec import ModelSpec
from zero_inference.norms.choice import refuse_norm_kernels
from zero_inference.utils.distributed import Ranks


def check_launch(config: RunConfig, ranks: Ranks, machine: Machine) -> None:
    """Raises UsageError: the batch does not divide over the ranks, or there is no GPU for what was asked."""
    if config.batch_size % ranks.world_size:
        advice = batch_advice(config.batch_size, ranks.world_size, f"{ranks.world_size} ranks")
        raise UsageError(f"{advice} (deepspeed --num_gpus N, torchrun --nproc-per-node N).")
    if not machine.is_here and ranks.device.type == "cuda" and ranks.local_world_size > machine.gpus():
        raise UsageError(
            f"{ranks.local_world_size} ranks were started for a machine with {machine.gpus()} GPU"
            f"{'s' * (machine.gpus() > 1)}; start one rank per GPU."
        )
    if ranks.device.type == "cpu":
        for flag, given in (("--pin-memory 1", config.pin_memory), ("--pin-kv-cache", config.pin_kv_cache)):
            if given:
                raise UsageError(f"{flag} page-locks memory for copies to a GPU, and there is no GPU here; drop it.")
        if config.norm_kernels == "cuda":
            raise UsageError("--norm-kernels cuda: there is no CUDA device here; use auto or off.")
    elif ranks.local_rank >= machine.gpus():
        raise UsageError(
            f"local rank {ranks.local_rank} has no GPU: {machine.gpus()} are visible; start fewer processes."
        )


def check_model(config: RunConfig, spec: ModelSpec) -> None:
    """Raises UsageError: too many positions, or norms that our kernels do not know."""
    positions = spec.max_positions
    if positions is not None and config.positions > positions:
        raise UsageError(
            f"--prompt-len {config.prompt_len} and --gen-len {config.gen_len} need {config.positions} positions; "
            f"{spec.name} has {positions}: shorten one of them."
        )
    refuse_norm_kernels(config.norm_kernels, spec.config.model_type)
    if config.dummy_routing != DEFAULTS["dummy_routing"] and spec.dummy_routing is None:
        raise UsageError(f"--dummy-routing {config.dummy_routing}: {spec.name} has no experts; drop it.")
