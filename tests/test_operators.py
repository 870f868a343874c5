"""What a pass computes and keeps in memory, found on the meta device, against hand computations and the profiler; and what the host takes
to launch it, measured."""

import functools
from itertools import accumulate

import pytest
import torch
from conftest import build_model
from kernel_cases import SeenOperators

from zero_inference.config.run_config import parse_options
from zero_inference.hardware.bench_device import ROUNDS, LaunchBench
from zero_inference.models.empty_model import build_empty_model, estimate_activation_bytes, logits_bytes
from zero_inference.models.layers import decoder_layers
from zero_inference.models.spec import resolve_model
from zero_inference.models.tracing import ShapeCache, trace_pass


def described(model: str, dtype: str = "bfloat16", dummy: bool = True):
    spec = resolve_model(parse_options(["--model", model, "--dtype", dtype, *["--dummy"] * dummy]), "cpu")
    return build_empty_model(spec), spec


@pytest.mark.parametrize("model", ["opt-125m", "llama-3.2-1b", "bloom-560m", "qwen3-8b"])
@pytest.mark.parametrize("tokens, past", [(1, 0), (1, 100), (33, 0)])
def test_operations_and_weights_of_a_pass(model, tokens, past):
    """2 operations a weight of the layers and token, and 2 for each of the scores, and for what they weigh; the head for one token."""
    empty_model, spec = described(model)
    found = trace_pass(empty_model.model, spec, tokens, past)
    layers = list(decoder_layers(empty_model.model)[1].parameters())
    config = spec.text_config
    head = config.vocab_size * config.hidden_size
    assert found.total("layer_bytes") == 2 * sum(p.numel() for p in layers), "each weight once"
    matrices = sum(p.numel() for p in layers if p.dim() > 1)
    heads = config.num_attention_heads
    width = heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
    pairs = tokens * past + tokens * (tokens + 1) // 2
    attention = 4 * pairs * width * config.num_hidden_layers
    assert found.total("flops") == pytest.approx(2 * (matrices * tokens + head) + attention, rel=0.01)
    assert found.total("outside_bytes") >= 2 * head and found.total("expert_bytes") == 0
    assert found.launches > 10 * config.num_hidden_layers


def test_experts_are_told_from_other_weights():
    empty_model, spec = described("qwen3-30b-a3b")
    found = trace_pass(empty_model.model, spec, 1, 10)
    number, chosen = spec.experts
    assert (number, chosen) == (128, 8)
    assert found.total("expert_bytes") == empty_model.sizes.idle_expert_bytes * number // (number - chosen)
    active = empty_model.sizes.parameters - empty_model.sizes.idle_parameters
    assert found.total("flops") == pytest.approx(2 * active, rel=0.01), "of experts only what a token chooses"


def test_float32_counts_four_bytes_an_element():
    empty_model, spec = described("mixtral-8x7b-v0.1", "float32")
    found = trace_pass(empty_model.model, spec, 1, 10)
    # its grouped products know bfloat16 alone there
    assert found.total("layer_bytes") + found.total("expert_bytes") > 4 * 45e9


def test_what_the_host_takes_is_measured():
    launching = LaunchBench(torch.device("cpu"))
    launching.visit()
    launching.visit()
    assert {len(model.rounds_s) for model in launching.models} == {2 * ROUNDS}
    found = launching.result()
    assert 0 < found.operator_s + found.module_s < 1e-2 and 0 <= found.step_s < 1 and found.graph_operator_s is None
    for model in launching.models:  # a generation of one step more takes a step longer
        step_s = 5e-4 + model.operators * 3e-6 + model.module_calls * 11e-6
        model.rounds_s = [step_s, 1.0, 0.5 * step_s]
    found = launching.result()
    assert (found.operator_s, found.module_s, found.step_s) == pytest.approx((3e-6, 11e-6, 5e-4))
    for model in launching.models:  # noise: more operators take less time
        model.rounds_s = [5e-4 - model.operators * 1e-7 + model.module_calls * 11e-6]
    found = launching.result()
    assert found.operator_s == 0.0 < found.module_s, "no cost is negative"


@pytest.mark.parametrize("family", ["llama", "opt", "mixtral", "bloom"])
def test_calls_of_modules_are_those_of_a_real_pass(family):
    model, calls = build_model(family), []
    ids = torch.tensor([[5]])
    with torch.nn.modules.module.register_module_forward_pre_hook(lambda module, args: calls.append(module)):
        model(input_ids=ids)
    found = trace_pass(model, None, 1, 0)
    assert found.module_calls == len(calls) > 10


@pytest.mark.parametrize("model, layers, each", [("llama-3.2-1b", 16, 3), ("opt-125m", 12, 2), ("qwen3-8b", 36, 3)])
def test_products_with_the_same_input_are_found(model, layers, each):
    """Keys and values have that of the queries, and a gated feed-forward's second half that of the first."""
    empty_model, spec = described(model)
    found = trace_pass(empty_model.model, spec, 1, 10)
    assert sum(count for operator, count in found.operators.items() if operator.same_input) == layers * each


@pytest.mark.parametrize("batch", [1, 3])
def test_a_prefill_multiplies_the_head_once(batch):
    """PyTorch makes a product of batches of a slice without gradients, and copies the head for it: most of a prefill's time on a CPU."""
    from transformers import AutoModelForCausalLM

    spec = described("opt-125m")[1]
    spec.config.num_hidden_layers = 1
    model = build_empty_model(spec).model.to_empty(device="cpu")
    plain = AutoModelForCausalLM.from_config(spec.config, dtype=spec.dtype).requires_grad_(False).eval()
    ids = torch.zeros(batch, 8, dtype=torch.int64)
    found = {}
    for name, each in (("ours", model), ("plain", plain)):
        with torch.no_grad(), SeenOperators() as seen:
            each(input_ids=ids, logits_to_keep=1)
        batched = [args[1] for operator, args in seen.calls if operator == "aten.bmm.default"]
        found[name] = sum(right.shape[-1] == spec.config.vocab_size for right in batched)
    assert found["ours"] == 0 and (found["plain"] or batch == 1), "drop the hook once PyTorch no longer needs it"


LENGTH = 96


def profiled_peak(model, ids: torch.Tensor) -> int:
    """Most bytes that were allocated and not freed during a prefill without a cache's growth, by the profiler's events."""
    from torch.profiler import ProfilerActivity, profile

    with torch.no_grad(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        model(input_ids=ids, use_cache=False, logits_to_keep=1)
    events = [each for each in seen.profiler.kineto_results.events() if each.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    return max(accumulate(each.nbytes() for each in events))


@pytest.mark.parametrize("family", ["llama", "opt", "qwen3", "gpt_neox", "mixtral"])
def test_the_peak_is_what_the_profiler_sees(family, checkpoints):
    from transformers import AutoModelForCausalLM

    empty_model, spec = described(str(checkpoints(family)), "float32", dummy=False)
    found = trace_pass(empty_model.model, spec, LENGTH, 0).peak_bytes
    model = AutoModelForCausalLM.from_pretrained(checkpoints(family), dtype=torch.float32, attn_implementation="sdpa")
    seen = profiled_peak(model.eval(), torch.zeros(1, LENGTH, dtype=torch.int64))
    assert found == pytest.approx(seen, rel=0.1 if family == "mixtral" else 0.01)


def test_the_peak_grows_with_the_prompt_and_the_batch(checkpoints):
    empty_model, spec = described(str(checkpoints("llama")), dummy=False)
    of_one = empty_model.activation_bytes(spec, 1, LENGTH)
    assert empty_model.activation_bytes(spec, 8, LENGTH) == 8 * of_one
    assert empty_model.activation_bytes(spec, 1, 4 * LENGTH) == pytest.approx(4 * of_one, rel=0.05)
    assert empty_model.activation_bytes(spec, 1, 1) >= logits_bytes(spec)


@pytest.mark.parametrize("why", ["loops over positions", "reads values"])
def test_a_model_that_cannot_be_traced_is_estimated(why, checkpoints, monkeypatch):
    empty_model, spec = described(str(checkpoints("llama")), dummy=False)
    if why == "reads values":
        monkeypatch.setattr(type(empty_model.model), "forward", lambda self, input_ids, **more: input_ids.max().item())
    else:
        monkeypatch.setattr("zero_inference.models.tracing.MAX_OPERATORS", 20)
    assert trace_pass(empty_model.model, spec, LENGTH, 0) is None
    assert empty_model.activation_bytes(spec, 2, LENGTH) == 2 * estimate_activation_bytes(spec, LENGTH)


@pytest.mark.parametrize("default", [torch.float32, torch.bfloat16])
def test_repeated_operators_give_the_shapes_of_their_own_arguments(default, request):
    """Results of PyTorch on the CPU, each computed twice: the second time its shape is known. Some have the default dtype."""
    request.addfinalizer(functools.partial(torch.set_default_dtype, torch.get_default_dtype()))
    torch.set_default_dtype(default)

    def results(device):
        whole = torch.ones(2, 3, dtype=torch.int64, device=device)
        rows = torch.ones(4, 2, 6, device=device)
        for tensor in (whole, whole, rows, rows.transpose(0, 2)[:2]):
            yield from (tensor * 2, tensor * 2.0, tensor.sum(-1), tensor.sum(-1, keepdim=True), torch.cat([tensor] * 2))
            yield tensor.mT.contiguous()
            yield tensor.clone().add_(1).unsqueeze(0)
        yield from (whole / whole, torch.full((2,), 1.0, device=device))

    with ShapeCache():
        repeated = [*results("meta"), *results("meta")]
    for found, expected in zip(repeated, [*results("cpu"), *results("cpu")], strict=True):
        assert (found.shape, found.stride(), found.dtype) == (expected.shape, expected.stride(), expected.dtype)
    assert len({found.untyped_storage()._cdata for found in repeated}) == len(repeated)
