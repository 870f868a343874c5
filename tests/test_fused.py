"""Kernels that stand for several of PyTorch's: what they compute, for which models a trial lets them, and that these give the same."""

from __future__ import annotations

import contextlib
import copy
import importlib
import itertools

import pytest
import torch
from conftest import VOCAB, build_model
from kernel_cases import ON_GPU, on_gpu
from test_stream_experts import mixtures  # noqa: F401  (a fixture)
from torch import nn
from transformers import AutoModelForCausalLM

from zero_inference import load
from zero_inference.kernels import rotary
from zero_inference.kernels.rotary import Form, rotary_kernel, rotate, supported_forms
from zero_inference.measure import session
from zero_inference.models.mlp import RouterForm, choose_experts_reference, detect_routers, install_routing_kernel
from zero_inference.models.prompts import greedy_config, reset_generation_config

DEVICES = ["cpu", pytest.param("cuda", marks=ON_GPU)]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
AS_GIVEN, IN_ORDER = Form(1, False), Form(1, True)
# transformers' functions, by what they compute with cos as wide as a head, half as wide, and less
FUNCTIONS = {
    "llama": (AS_GIVEN, None, None),
    "qwen3_moe": (AS_GIVEN, None, None),
    "gpt_neox": (IN_ORDER, IN_ORDER, IN_ORDER),  # joined with what is not rotated
    "gpt_oss": (None, Form(2, True), None),  # angles of half a head
    "glm": (None, None, None),  # neighbours are a pair
    "cohere": (None, None, None),  # rounded once
    "gemma4": (None, None, None),  # of one tensor
    "gptj": (None, None, None),
}


@pytest.fixture(params=DEVICES)
def device(request) -> torch.device:
    if request.param == "cuda":
        request.getfixturevalue("cuda_kernels")
    return torch.device(request.param)


def function_of(family: str):
    return getattr(importlib.import_module(f"transformers.models.{family}.modeling_{family}"), rotary.NAME)


@pytest.mark.parametrize("dtype", DTYPES[::2], ids=str)
@pytest.mark.parametrize("family", FUNCTIONS)
def test_a_trial_finds_the_functions_that_have_the_bits_of_the_kernel(family, dtype, device):
    found = supported_forms(function_of(family), device, dtype)
    # rounding once and rounding each time are the same in float32
    assert found == FUNCTIONS[family] or (family == "cohere" and dtype == torch.float32)


def heads(batch: int, number: int, tokens: int, head_dim: int, layout: str, device, dtype) -> torch.Tensor:
    """Random [batch, number, tokens, head_dim], as models make them."""
    if layout == "in order":
        return torch.randn(batch, number, tokens, head_dim, device=device).to(dtype)
    wide = 3 if layout == "of one product" else 1  # with keys and values beside them
    rows = torch.randn(batch, tokens, number * wide * head_dim, device=device).to(dtype)
    return rows[..., : number * head_dim].unflatten(-1, (number, head_dim)).transpose(1, 2)


def expression(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, rotated: int) -> torch.Tensor:
    cos, sin = (torch.cat((each,) * (rotated // each.shape[-1]), -1).unsqueeze(1) for each in (cos, sin))
    first, second = x[..., : rotated // 2], x[..., rotated // 2 : rotated]
    turned = x[..., :rotated] * cos + torch.cat((-second, first), -1) * sin
    return torch.cat((turned, x[..., rotated:]), -1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["in order", "transposed", "of one product"])
def test_rotation_has_the_bits_of_the_expression_sanitized(layout, dtype, device):
    torch.manual_seed(3)
    shapes = itertools.product((1, 3), ((32, 4), (5, 5), (8, 1)), (1, 7), (2, 80, 128))
    for batch, (number, of_keys), tokens, head_dim in shapes:
        q = heads(batch, number, tokens, head_dim, layout, device, dtype)
        k = heads(batch, of_keys, tokens, head_dim, layout, device, dtype)
        widths = {(head_dim, 1), (head_dim // 2, 2)} | ({(head_dim // 4, 1)} if head_dim > 2 else set())
        for (width, times), batch_of_angles in itertools.product(widths, {1, batch}):
            cos, sin = (torch.randn(batch_of_angles, tokens, width, device=device).to(dtype) for _ in range(2))
            for form in (Form(times, False), Form(times, True)):
                for x, found in zip((q, k), rotate(q, k, cos, sin, form)):
                    assert torch.equal(found, expression(x, cos, sin, times * width)), (q.shape, k.shape, width, times)


@contextlib.contextmanager
def counted(monkeypatch):
    """Yield a list with an entry for each call of the kernel."""
    calls = []
    monkeypatch.setattr(rotary, "rotate", lambda *args: calls.append(args) or rotate(*args))
    yield calls
    monkeypatch.undo()


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "mixtral", "qwen3"])
def test_models_compute_the_same_logits_with_it(family, device, monkeypatch):
    model = build_model(family, "bfloat16").to(device)
    ids = torch.arange(3, 21, device=device).reshape(2, 9) % VOCAB
    with torch.no_grad():
        expected = model(ids).logits
        with rotary_kernel(model, device, torch.bfloat16), counted(monkeypatch) as calls:
            found = model(ids).logits
        assert len(calls) == model.config.num_hidden_layers and torch.equal(found, expected)
        assert torch.equal(model(ids).logits, expected) and len(calls) == model.config.num_hidden_layers


def test_gradients_other_calls_and_long_passes_go_to_the_models_own_function(monkeypatch):
    model = build_model("llama")
    q, k = (torch.randn(1, 5, heads, 16).transpose(1, 2) for heads in (4, 2))
    cos, sin = torch.randn(2, 1, 5, 16).unbind(0)
    with rotary_kernel(model, torch.device("cpu"), torch.float32), counted(monkeypatch) as calls:
        embed = function_of("llama")
        assert embed(q, k, cos, sin) and len(calls) == 1
        q.requires_grad_()
        embed(q, k, cos, sin)[0].sum().backward()
        assert q.grad is not None and len(calls) == 1
        others = [
            ((q.detach().double(), k.double(), cos, sin), {}),
            ((q.detach(), k, cos.double(), sin.double()), {}),
            ((q.detach().transpose(1, 2), k.transpose(1, 2), cos, sin), {"unsqueeze_dim": 2}),
        ]
        for args, options in others:
            expected = embed.before(*args, **options)
            assert all(torch.equal(*pair) for pair in zip(embed(*args, **options), expected))
        monkeypatch.setattr(rotary, "MAX_TOKENS", 4)
        embed(q.detach(), k, cos, sin)
        assert len(calls) == 1


FORMS = {
    "softmax, then the largest": (True, False),
    "with a sum of one": (True, True),
    "the largest first": (False, False),
}
SIZES = [(1, 1), (7, 2), (8, 8), (33, 5), (60, 4), (128, 8), (256, 8), (512, 10), (1000, 17), (1024, 32)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_routing_chooses_what_torch_does_sanitized(form, dtype, device):
    torch.manual_seed(5)
    for (experts, k), tokens in itertools.product(SIZES, (0, 1, 3, 66)):
        # neighbouring numbers of bfloat16 up to 16, all different in each dtype
        values = (torch.arange(experts, dtype=torch.int16) + 0x4180 - experts).view(torch.bfloat16)
        rows = [torch.randperm(experts) for _ in range(tokens)]
        logits = values[torch.stack(rows) if rows else torch.empty(0, experts).long()].to(device, dtype)
        for in_float32 in (False, True):
            arguments = (logits, k, *FORMS[form], in_float32)
            weights, chosen = torch.ops.zero_inference.choose_experts(*arguments)
            expected, expected_chosen = choose_experts_reference(*arguments)
            assert torch.equal(chosen, expected_chosen), (experts, k, tokens)
            assert weights.dtype == expected.dtype
            eps = torch.finfo(weights.dtype).eps * (8 if weights.dtype == torch.float32 else 1)
            torch.testing.assert_close(weights, expected, rtol=eps, atol=0)


@on_gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_routing_of_equal_logits_nan_and_infinities_stays_among_the_experts_sanitized(dtype):
    for (experts, k), (softmax_first, normalized) in itertools.product(SIZES[1:], FORMS.values()):
        rows = torch.stack([torch.full((experts,), value) for value in (0.0, torch.nan, torch.inf, -torch.inf)])
        mixed = torch.randn(3, experts)
        mixed[0, experts // 2] = torch.nan
        mixed[1, experts // 2] = -torch.inf
        mixed[2, : experts // 2] = 4.0  # equal
        logits = torch.cat((rows, mixed)).to("cuda", dtype)
        weights, chosen = torch.ops.zero_inference.choose_experts(logits, k, softmax_first, normalized, True)
        assert ((chosen >= 0) & (chosen < experts)).all()
        assert all(len(set(row)) == k for row in chosen.tolist()), "no expert twice"
        assert chosen[0].tolist() == list(range(k)), "equal ones in order"
        ranked = logits[6].float().softmax(-1) if softmax_first else logits[6].float()
        assert chosen[6].tolist() == ranked.sort(descending=True, stable=True).indices[:k].tolist()
        assert weights[1].isnan().all() and weights[0].isfinite().all() and weights[5:].isfinite().all()
        assert softmax_first or chosen[4, 0] == experts // 2, "NaN is larger than any number, as for torch.topk"


ROUTERS = {
    "mixtral": RouterForm(2, True, True, True, torch.float32, torch.float32),
    "qwen3_moe": RouterForm(3, True, False, True, torch.float32, torch.float32),
    "gpt_oss": RouterForm(3, False, False, True, torch.float32, torch.float32),
    "deepseek_v3": None,  # sigmoid, groups of experts
}


@pytest.mark.parametrize("family", ROUTERS)
def test_routers_that_compute_it_are_found_and_give_the_same(family, mixtures, device):  # noqa: F811
    folder, _ = mixtures(family)
    model = AutoModelForCausalLM.from_pretrained(folder).eval().to(device)
    with torch.device("meta"):
        empty_model = AutoModelForCausalLM.from_config(model.config, dtype=torch.float32)
    found = detect_routers(empty_model, device)
    layers = model.config.num_hidden_layers
    assert list(found.values()) == ([] if ROUTERS[family] is None else [ROUTERS[family]] * layers)
    ids = torch.arange(3, 21, device=device).reshape(2, 9) % VOCAB
    settings = greedy_config(8)
    reset_generation_config(model)
    with torch.no_grad():
        expected, ids_expected = model(ids).logits, model.generate(ids, generation_config=settings)
        install_routing_kernel(model, found)
        torch.testing.assert_close(model(ids).logits, expected, rtol=1e-4, atol=1e-4)
        assert torch.equal(model.generate(ids, generation_config=settings), ids_expected)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_a_loaded_model_uses_both_until_it_is_unloaded(family, mixtures, monkeypatch):  # noqa: F811
    folder, _ = mixtures(family)
    own = function_of(family)
    if not torch.cuda.is_available():  # the same code then, with what stands for the kernels there
        monkeypatch.setattr(session, "has_kernels", lambda *_: True)
    ids = torch.arange(3, 21).reshape(2, 9) % VOCAB
    plain = AutoModelForCausalLM.from_pretrained(folder).eval()
    reset_generation_config(plain)
    expected = plain.generate(ids, generation_config=greedy_config(8))
    with (
        load(folder, engine="stream", batch_size=2, max_length=32, dtype="fp32", verbose=0) as model,
        counted(monkeypatch) as calls,
    ):
        assert torch.equal(model.generate(ids, generation_config=greedy_config(8)).cpu(), expected)
        routers = [module for module in model.modules() if type(module).__name__.endswith("TopKRouter")]
        assert calls and function_of(family) is not own
        assert len(routers) == 3 and all("forward" in vars(router) for router in routers)
    assert function_of(family) is own


class Scaled(nn.Module):
    """A router whose weights are those of Mixtral, times `factor`."""

    def __init__(self, factor: float):
        super().__init__()
        self.top_k, self.factor = 2, factor
        self.weight = nn.Parameter(torch.randn(8, 16).to(torch.bfloat16))

    def forward(self, hidden_states):
        logits = nn.functional.linear(hidden_states, self.weight)
        weights, numbers = choose_experts_reference(logits, self.top_k, True, True, True)
        return logits, self.factor * weights, numbers


def test_a_router_that_differs_a_little_keeps_its_code(device):
    model = nn.ModuleDict({"one": Scaled(1.0), "other": Scaled(1.001)}).to(device)
    found = detect_routers(model, device)
    assert found.keys() == {"one"}
    assert not detect_routers(copy.deepcopy(model).double(), device), "a dtype that the kernel does not have"
    x = torch.randn(5, 16, device=device).to(torch.bfloat16)
    expected = model["other"](x)
    install_routing_kernel(model, found)
    assert all(torch.equal(*pair) for pair in zip(model["other"](x), expected))
    model["one"](x.requires_grad_())[1].sum().backward()
    assert model["one"].weight.grad is not None, "with gradients the router's own code computes"


@on_gpu
def test_both_are_kernels_of_a_cuda_graph():
    from zero_inference.utils.timing import capture_graph

    cuda = torch.device("cuda")
    q, k = (heads(1, number, 1, 128, "transposed", cuda, torch.bfloat16) for number in (32, 4))
    cos, sin = (torch.randn(1, 1, 128, device=cuda).to(torch.bfloat16) for _ in range(2))
    logits, kept = torch.randn(1, 128, device=cuda).to(torch.bfloat16), []

    def step() -> None:
        kept[:] = (
            *rotate(q, k, cos, sin, AS_GIVEN),
            *torch.ops.zero_inference.choose_experts(logits, 8, True, True, False),
        )

    repeat = capture_graph(cuda, step)
    of_graph = list(kept)
    for x in (q, logits):
        x.copy_(torch.randn_like(x))
    repeat()
    step()
    assert all(torch.equal(*pair) for pair in zip(of_graph, kept))
