"""Attention of decode steps: what goes to the kernel, and the kernel against float64 on a GPU."""

from __future__ import annotations

import itertools

import pytest
import torch
from kernel_cases import SeenOperators, on_gpu, relative_error
from transformers import GptOssConfig
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssAttention

from zero_inference.kernels import decode_attention

BOUNDS = {torch.float16: 1e-3, torch.bfloat16: 4e-3, torch.float32: 1e-5}  # of norms, relative
MASKS = ("boolean", "added", "of each head", "of each query", "one for all")


class Case:
    """Random states as models and caches hand them out: queries as a view of [batch, queries, heads, width], the first `positions` of a
    longer cache, and a mask that hides the first and last positions of each sequence, others in between. With `sinks`, some are far
    above all scores and some far below."""

    def __init__(
        self, batch, heads, key_heads, queries, positions, widths, dtype, mask="added", device="cpu", sinks=False
    ):
        width, value_width = widths
        draw = torch.Generator(device).manual_seed(positions + heads)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=draw, device=device).to(dtype)

        self.query = 2 * normal(batch, queries, heads, width).transpose(1, 2)
        self.key = normal(batch, key_heads, positions + 5, width)[:, :, :positions]
        self.value = 1 + normal(batch, key_heads, positions + 5, value_width)[:, :, :positions]
        self.scale = 0.7 * width**-0.5
        self.sinks = (
            torch.tensor([1.5, -2.0, 30.0, -60.0, 4.0]).repeat(heads)[:heads].to(device, dtype) if sinks else None
        )
        shape = [1 if mask == "one for all" else batch, 1, 1, positions]
        shape[1] = heads if mask == "of each head" else 1
        shape[2] = queries if mask == "of each query" else 1
        place = torch.arange(positions, device=device)
        sequence = torch.arange(shape[0], device=device)[:, None, None, None]
        seen = torch.rand(shape, generator=draw, device=device) < 0.8
        seen &= (place >= positions // 3 + sequence) & (place <= positions * 3 // 4)
        seen[..., positions // 2 :][..., :1] = True  # of each row at least one
        added = torch.randn(shape, generator=draw, device=device).to(dtype)
        self.mask = seen if mask == "boolean" else added.masked_fill(~seen, torch.finfo(dtype).min)

    def found(self) -> torch.Tensor:
        states = self.query, self.key, self.value, self.mask
        return torch.ops.zero_inference.decode_attention(*states, self.scale, self.sinks)

    def exact(self) -> torch.Tensor:
        groups = self.query.shape[1] // self.key.shape[1]
        key, value = (each.double().repeat_interleave(groups, dim=1) for each in (self.key, self.value))
        scores = self.query.double() @ key.transpose(2, 3) * self.scale
        hidden = ~self.mask if self.mask.dtype == torch.bool else self.mask <= torch.finfo(self.mask.dtype).min
        scores = (scores if self.mask.dtype == torch.bool else scores + self.mask).masked_fill(hidden, -torch.inf)
        if self.sinks is not None:
            sinks = self.sinks.double()[:, None, None].expand(*scores.shape[:3], 1)
            scores = torch.cat([scores, sinks], dim=3)
            value = torch.cat([value, torch.zeros_like(value[:, :, :1])], dim=2)
        return (scores.softmax(dim=3) @ value).transpose(1, 2)

    def check(self) -> None:
        found, exact = self.found(), self.exact()
        assert found.shape == exact.shape and found.dtype == self.query.dtype and found.is_contiguous()
        assert relative_error(found, exact) < BOUNDS[self.query.dtype]


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("sinks", [False, True])
def test_the_operator_on_a_cpu(mask, dtype, sinks):
    Case(2, 6, 2, 3, 20, (16, 24), dtype, mask, sinks=sinks).check()


@pytest.mark.parametrize(
    "change",
    [
        {"query": torch.zeros(1, 4, 1, 16, dtype=torch.float64)},
        {"key": torch.zeros(1, 3, 9, 16), "value": torch.zeros(1, 3, 9, 16)},
        {"value": torch.zeros(1, 2, 8, 16)},
        {name: torch.zeros(1, 2, 0, 16) for name in ("key", "value")},
        {"value": torch.zeros(1, 2, 9, 12)},
        {"value": torch.zeros(1, 2, 9, 264)},
        {"key": torch.zeros(1, 2, 16, 9).transpose(2, 3)},
        {"key": torch.zeros(1 + 2 * 9 * 16)[1:].view(1, 2, 9, 16)},  # not on 16 bytes
        {"value": torch.zeros(1, 2, 9, 18)[..., :16]},
        {"mask": torch.zeros(1, 1, 1, 8)},
        {"mask": torch.zeros(1, 2, 1, 9)},
        {"mask": torch.zeros(9)},
        {"mask": torch.zeros(1, 1, 1, 9, device="meta")},
        {"mask": torch.zeros(1, 1, 1, 9, dtype=torch.float16)},
        {"mask": torch.zeros(1, 1, 1, 18)[..., ::2]},
        {"sinks": torch.zeros(2)},
        {"sinks": torch.zeros(8)[::2]},
        {"sinks": torch.zeros(4, dtype=torch.float64)},
        {"sinks": torch.zeros(4, device="meta")},
    ],
)
def test_what_it_does_not_take_is_refused(change):
    given = {"query": torch.zeros(1, 4, 1, 16), "key": torch.zeros(1, 2, 9, 16), "value": torch.zeros(1, 2, 9, 16)}
    given = given | {"mask": torch.zeros(1, 1, 1, 9), "scale": 0.5} | change
    with pytest.raises(ValueError, match="decode_attention does not take"):
        torch.ops.zero_inference.decode_attention(**given)


def which(case: Case, **options) -> list[str]:
    """Return what computes `case`: "own", "kernel" or, for rows of one product, nothing."""
    own = []
    states = case.query, case.key, case.value, case.mask
    with SeenOperators() as seen, torch.no_grad():
        decode_attention.attend(lambda *args, **more: own.append("own") or (None, None), None, *states, **options)
    return own or ["kernel" for name, _ in seen.calls if "decode_attention" in name]


def test_on_a_cpu_nothing_goes_to_the_kernel():
    assert which(Case(2, 4, 2, 1, 9, (16, 16), torch.float32)) == []
    assert which(Case(2, 4, 4, 1, 9, (16, 16), torch.float32)) == ["own"]
    without = Case(2, 4, 2, 1, 9, (16, 16), torch.float32)
    without.mask = None
    assert which(without) == ["own"]


@on_gpu
def test_on_a_gpu_what_it_can_compute_goes_to_the_kernel():
    def case(*sizes, mask="added", dtype=torch.bfloat16):
        return Case(*sizes, dtype, mask, "cuda")

    assert which(case(2, 4, 2, 1, 9, (16, 16))) == which(case(2, 4, 4, 1, 9, (16, 16))) == ["kernel"]
    assert which(case(2, 4, 2, 3, 9, (16, 16))) == ["kernel"]
    for more in ({"dropout": 0.1}, {"softcap": 30.0}, {"position_bias": torch.zeros(1)}, {"output_attentions": True}):
        assert which(case(2, 4, 2, 1, 9, (16, 16)), **more) == ["own"]
    sinks = torch.zeros(4, dtype=torch.bfloat16, device="cuda")
    assert which(case(2, 4, 2, 1, 9, (16, 16)), s_aux=sinks) == ["kernel"]
    for queries, given in ((9, sinks), (1, sinks.double())):
        assert which(case(2, 4, 2, queries, 9, (16, 16)), s_aux=given) == [], "PyTorch's kernel and its log-sum-exp"
    without = case(2, 4, 2, 3, 9, (16, 16))
    without.mask = None
    assert which(without, is_causal=True) == ["own"]
    assert which(case(2, 4, 2, 9, 9, (16, 16))) == ["own"]
    assert which(case(2, 4, 2, 1, 9, (12, 12))) == []
    learned = case(2, 4, 4, 1, 9, (16, 16))
    learned.query.requires_grad_()
    states, own = (learned.query, learned.key, learned.value, learned.mask), []
    decode_attention.attend(lambda *args, **more: own.append(args), torch.nn.Module(), *states)
    assert own


def check_prompt(case: Case) -> None:
    refused = []
    states = case.query, case.key, case.value, case.mask
    with torch.no_grad():
        found, _ = decode_attention.attend(
            lambda *args, **more: refused.append(args) or (None, None),
            torch.nn.Module(),
            *states,
            scaling=case.scale,
            s_aux=case.sinks,
        )
    assert not refused and found.dtype == case.query.dtype and found.is_contiguous()
    assert relative_error(found, case.exact()) < 2 * BOUNDS[case.query.dtype]


PROMPTS = [(2, 6, 2, 1, 20, (16, 16)), (2, 6, 2, 21, 37, (16, 16)), (1, 8, 8, 70, 70, (64, 64))]


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("mask", MASKS)
def test_prompts_with_sinks(mask, dtype):
    for sizes in PROMPTS:
        check_prompt(Case(*sizes, dtype, mask, sinks=True))


@on_gpu
@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("mask", MASKS)
def test_prompts_with_sinks_on_a_gpu(mask, dtype):
    for sizes in (*PROMPTS, (1, 64, 8, 512, 512, (64, 64)), (2, 8, 1, 33, 45, (128, 128))):
        check_prompt(Case(*sizes, dtype, mask, "cuda", sinks=True))


@pytest.mark.parametrize("queries", [1, 5])
def test_a_family_with_sinks_attends_by_it_until_it_is_closed(queries):
    """gpt-oss's own function gives the same; a call without sinks stays with it."""
    case = Case(2, 8, 2, queries, 20, (16, 16), torch.float32, sinks=True)
    before = modeling_gpt_oss.eager_attention_forward
    config = GptOssConfig(num_hidden_layers=1, hidden_size=64, num_attention_heads=8, num_key_value_heads=2)
    config._attn_implementation = "eager"
    model, other = GptOssAttention(config, 0), GptOssAttention(config, 0)
    model.sinks = other.sinks = torch.nn.Parameter(case.sinks, requires_grad=False)

    def call(module=model, **more):
        states = case.query, case.key, case.value, case.mask
        return modeling_gpt_oss.eager_attention_forward(module, *states, scaling=case.scale, **more)

    expected, weights = call()
    assert weights is not None
    with torch.no_grad(), decode_attention.using_decode_attention(model):
        found, weights = call(s_aux=case.sinks)
        torch.testing.assert_close(found, expected)
        assert weights is None and call()[1] is not None
        assert call(other, s_aux=case.sinks)[1] is not None, "a module of another model"
        config.output_attentions = True
        assert call(s_aux=case.sinks)[1] is not None
        config.output_attentions = False
    with torch.no_grad(), decode_attention.using_prompt_attention(model):
        assert (call(s_aux=case.sinks)[1] is None) == (queries > 1), "a step is the family's own"
    assert modeling_gpt_oss.eager_attention_forward is before


SIZES = [  # batch, heads, key heads, queries, positions, widths
    (1, 32, 4, 1, 576, (128, 128)),  # eight blocks of eight warps divide the keys of a head
    (1, 64, 8, 1, 576, (64, 64)),  # gpt-oss
    (2, 8, 1, 1, 161, (128, 128)),
    (3, 40, 40, 1, 300, (128, 128)),
    (64, 40, 8, 1, 130, (128, 128)),  # no cluster
    (1, 16, 1, 1, 1000, (128, 128)),  # sixteen rows
    (2, 6, 2, 3, 77, (128, 128)),  # nine of sixteen rows
    (2, 10, 2, 8, 50, (64, 64)),  # forty rows: three blocks
    (1, 71, 1, 1, 200, (64, 64)),
    (2, 8, 2, 1, 333, (80, 80)),
    (2, 8, 2, 2, 40, (96, 72)),
    (1, 8, 4, 1, 700, (256, 256)),
    (2, 12, 1, 1, 90, (192, 128)),
    (1, 4, 2, 1, 1, (8, 8)),
    (2, 4, 2, 1, 17, (56, 40)),
]


@on_gpu
@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_the_kernel_is_attention_in_float64(sizes, dtype):
    for mask, sinks in itertools.product(MASKS, (False, True)):
        case = Case(*sizes, dtype, mask, "cuda", sinks)
        case.check()
        first = case.found()
        assert all(torch.equal(first, case.found()) for _ in range(5)), "the same bits in every run"


@on_gpu
@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("kind", ["boolean", "added"])
def test_keys_and_values_that_a_mask_hides_are_not_read(kind, dtype):
    """Before a window, and past what a cache of fixed size holds: they are not numbers here."""
    case = Case(2, 16, 2, 1, 512, (128, 128), dtype, device="cuda")
    seen = torch.zeros(2, 1, 1, 512, dtype=torch.bool, device="cuda")
    seen[..., 96:288] = True
    case.mask = seen if kind == "boolean" else torch.zeros_like(seen, dtype=dtype).masked_fill(~seen, -torch.inf)
    exact = case.exact()
    for states in (case.key, case.value):
        states[:, :, :96] = states[:, :, 288:] = torch.nan
    assert relative_error(case.found(), exact) < BOUNDS[dtype]


@on_gpu
def test_a_sink_changes_nothing_if_no_score_is_near_it():
    case = Case(2, 64, 8, 1, 576, (64, 64), torch.bfloat16, device="cuda")
    without, case.sinks = case.found(), torch.full((64,), -torch.inf, dtype=torch.bfloat16, device="cuda")
    assert torch.equal(case.found(), without)
    case.sinks = torch.full_like(case.sinks, 1e4)
    assert not case.found().any()


@on_gpu
@pytest.mark.parametrize("sinks", [False, True])
def test_a_row_that_sees_nothing_is_zeros(sinks):
    case = Case(2, 8, 2, 1, 100, (64, 64), torch.float16, "boolean", "cuda", sinks)
    case.mask[1] = False
    found = case.found()
    assert found[0].abs().sum() > 0 and not found[1].any()


@on_gpu
def test_a_graph_follows_the_mask():
    """As a decode step's graph repeats it: memory stays, the mask shows one position more."""
    case = Case(1, 32, 4, 1, 300, (128, 128), torch.bfloat16, device="cuda")
    case.mask = torch.zeros(1, 1, 1, 300, dtype=torch.bfloat16, device="cuda")
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        case.found()
    stream.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        out = case.found()
    for length in (1, 16, 17, 299):
        case.mask.fill_(torch.finfo(torch.bfloat16).min)[..., :length] = 0
        graph.replay()
        assert relative_error(out, case.exact()) < BOUNDS[torch.bfloat16]
