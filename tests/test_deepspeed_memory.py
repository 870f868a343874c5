"""Gathered weights under ZeRO-3: the plan's simulation against DeepSpeed's own coordinator."""

import pytest
import torch

from zero_inference.config.run_config import RunConfig
from zero_inference.engines.deepspeed.memory import (
    ModulePeak,
    PartitionRules,
    module_peaks,
    pass_modules,
    simulate_fetches,
    stored_weights,
)
from zero_inference.models.spec import resolve_model
from zero_inference.planning.plan import plan_run
from zero_inference.utils.ranks import detect_ranks, start_process_group

LIVE = "_PartitionedParameterCoordinator__n_available_params"


def planned(**options):
    config = RunConfig(dummy=True, dtype="bfloat16", engine="deepspeed", **options).validate()
    ranks = detect_ranks()
    start_process_group(ranks)
    return plan_run(config, resolve_model(config, ranks.device.type), ranks)


def planned_bytes(plan) -> list[int]:
    """Return the gathered bytes while each module computes."""
    weights, job = plan.weights, plan.job
    rules = PartitionRules.of(weights.ds_config, job.spec.dtype, job.ranks.world_size)
    modules = pass_modules(job, rules, stored_weights(job, weights.quantization, rules))
    return simulate_fetches(modules, weights.ds_config["zero_optimization"])


@pytest.mark.parametrize("bits", [16, 8, 4])
@pytest.mark.parametrize("family", ["opt", "llama", "gpt_neox"])  # OPT's head is its embedding
def test_deepspeed_fetches_as_far_ahead_as_was_planned(family, bits, checkpoints, monkeypatch):
    from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator as Coordinator

    quantized = {"quant_bits": bits, "quant_group_size": 32} if bits < 16 else {}
    plan = planned(model=str(checkpoints(family)), cpu_offload=True, **quantized)
    expected, live, fetch = planned_bytes(plan), [], Coordinator.fetch_sub_module

    def recorded(self, module, forward):
        fetch(self, module, forward)
        live.append(getattr(self, LIVE))

    monkeypatch.setattr(Coordinator, "fetch_sub_module", recorded)
    loaded = plan.load()
    try:
        for _ in range(3):  # the coordinator knows the order from the second pass on
            live.clear()
            with torch.no_grad():
                loaded.model(input_ids=torch.zeros(1, 4, dtype=torch.int64), use_cache=False)
    finally:
        loaded.close()
    itemsize = plan.job.spec.dtype.itemsize
    assert max(expected) == itemsize * max(live) > 0
    assert set(expected) == {itemsize * each for each in live}


def test_a_head_is_fetched_beside_the_layers_that_the_limit_allows():
    """The limit is compared before a parameter is taken, and a head is larger than two layers of a 70B model."""
    plan = planned(model="llama-3.1-70b", cpu_offload=True, quant_bits=8)
    limit = 2 * plan.weights.ds_config["zero_optimization"]["stage3_max_live_parameters"]
    largest = 128256 * 8192 * (1 + 4 / 64)
    assert limit + 0.7 * largest < max(planned_bytes(plan)) < limit + largest


def test_without_a_gpu_a_rank_keeps_what_it_dequantized_and_gathers_nothing():
    plan = planned(model="opt-125m", cpu_offload=True, quant_bits=8)
    rules = PartitionRules.of(plan.weights.ds_config, torch.bfloat16, 1)
    weights = stored_weights(plan.job, plan.weights.quantization, rules)
    peaks = module_peaks(plan.job, plan.weights.ds_config, rules, weights)
    assert peaks == plan.weights.memory.peaks and {peak.nbytes for peak in peaks} == {2 * 50272 * 768}
    assert peaks[0].layers == 0 and peaks[-1] == ModulePeak(12, peaks[0].nbytes)
