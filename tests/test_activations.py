"""What a prefill keeps in memory, found on the meta device, against what PyTorch's own memory profiler sees on the CPU."""

import pytest
import torch

from zero_inference.config.run_config import RunConfig
from zero_inference.models.empty_model import build_empty_model
from zero_inference.models.operators import trace_pass
from zero_inference.models.sizes import estimate_prefill_bytes, logits_bytes
from zero_inference.models.spec import resolve_model

LENGTH = 96


def profiled_peak(model, ids: torch.Tensor) -> int:
    """Most bytes that were allocated and not freed during a prefill without a cache's growth, by the profiler's events."""
    from torch.profiler import ProfilerActivity, profile

    with torch.no_grad(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        model(input_ids=ids, use_cache=False, logits_to_keep=1)
    events = [each for each in seen.profiler.kineto_results.events() if each.name() == "[memory]"]
    now = most = 0
    for each in sorted(events, key=lambda event: event.start_ns()):
        now += each.nbytes()
        most = max(most, now)
    return most


@pytest.mark.parametrize("family", ["llama", "opt", "qwen3", "gpt_neox", "mixtral"])
def test_the_peak_is_what_the_profiler_sees(family, checkpoints):
    from transformers import AutoModelForCausalLM

    folder = checkpoints(family)
    config = RunConfig(model=str(folder), dtype="float32").validate()
    spec = resolve_model(config, "cpu")
    found = trace_pass(build_empty_model(spec).model, spec, LENGTH, 0).peak_bytes
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()
    seen = profiled_peak(model, torch.zeros(1, LENGTH, dtype=torch.int64))
    assert found == pytest.approx(seen, rel=0.1 if family == "mixtral" else 0.01)


def test_it_grows_with_the_prompt_and_the_batch(checkpoints):
    config = RunConfig(model=str(checkpoints("llama")), dtype="bfloat16").validate()
    spec = resolve_model(config, "cpu")
    empty_model = build_empty_model(spec)
    of_one = empty_model.activation_bytes(spec, 1, LENGTH)
    assert empty_model.activation_bytes(spec, 8, LENGTH) == 8 * of_one
    assert empty_model.activation_bytes(spec, 1, 4 * LENGTH) == pytest.approx(4 * of_one, rel=0.05)
    assert empty_model.activation_bytes(spec, 1, 1) >= logits_bytes(spec)


def test_a_model_that_loops_over_positions_is_not_traced_for_minutes(checkpoints, monkeypatch):
    config = RunConfig(model=str(checkpoints("llama")), dtype="bfloat16").validate()
    spec = resolve_model(config, "cpu")
    monkeypatch.setattr("zero_inference.models.operators.MAX_OPERATORS", 20)
    assert trace_pass(build_empty_model(spec).model, spec, LENGTH, 0) is None


def test_a_model_that_looks_at_values_is_estimated(checkpoints, monkeypatch):
    config = RunConfig(model=str(checkpoints("llama")), dtype="bfloat16").validate()
    spec = resolve_model(config, "cpu")
    empty_model = build_empty_model(spec)
    monkeypatch.setattr(type(empty_model.model), "forward", lambda self, input_ids, **more: input_ids.max().item())
    assert empty_model.activation_bytes(spec, 2, LENGTH) == 2 * estimate_prefill_bytes(spec, LENGTH)
