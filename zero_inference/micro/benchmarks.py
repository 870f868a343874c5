"""Time products of square matrices, `a * 1.2`, and transformer blocks with their parts. A benchmark yields rows as they are measured."""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils.benchmark import Timer

from zero_inference.errors import UsageError, is_out_of_memory
from zero_inference.hardware import bench_device
from zero_inference.hardware.spec import find_card
from zero_inference.models.built_in import find_preset
from zero_inference.models.spec import max_positions
from zero_inference.norms.patch import (
    apply_norm_kernels,
    check_norm_kernels_option,
    family_refusal,
    prepare_norm_kernels,
)
from zero_inference.utils.environment import describe_environment
from zero_inference.utils.model_sizes import kv_width
from zero_inference.utils.progress import current_progress
from zero_inference.utils.timing import time_wall_s

Row = dict[str, Any]
Benchmark = tuple[int, Iterator[Row]]  # the number of rows, and the rows
Call = Callable[[torch.Tensor], torch.Tensor]
Size = TypeVar("Size")

# Kind of product -> dtype of its operands. tf32 is float32 in memory, rounded to 10 bits of mantissa in the tensor cores.
DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
# Sizes of the products that give the matrix rate. A CPU is often fastest with matrices that fit its cache; a size is skipped if one
# product is expected to take longer than PROBE_CALL_S.
PROBE_SIZES = {"cuda": (2048, 8192), "cpu": (256, 512, 1024, 2048)}
PROBE_CALL_S = 0.2
CHEAP_CALL_S = 0.5  # a call that is expected to be shorter is timed; a longer one is only predicted
FORWARD_AND_BACKWARD = 3  # the backward pass has two products, for inputs and weights, per product of the forward pass
PARTS = ("dense", "dense_activation", "feed_forward", "attention")
FIRST_TOKENS = 16  # of the first forward pass that predicts how long others take


def median_s(action: Callable[[], object], min_run_time: float) -> float:
    """Return the median seconds of one call of `action`, by `Timer.blocked_autorange`, synchronized with the device."""
    # Timer uses one thread by default
    timer = Timer("action()", globals={"action": action}, num_threads=torch.get_num_threads())
    return timer.blocked_autorange(min_run_time=min_run_time).median


def once_s(device: torch.device, action: Callable[[], object]) -> float:
    """Return the approximate seconds of one call: the fastest of three, of fewer if a call is not cheap.

    On a GPU a further call comes first: the first of a process loads libraries, which took a second where the call took a millisecond.
    """
    if device.type == "cuda":
        action()
    calls: list[float] = []
    while len(calls) < 3 and sum(calls) < CHEAP_CALL_S:
        calls.append(time_wall_s(device, action))
    return min(calls)


def predict_s(time_once: Callable[[Size], float], work: Callable[[Size], float], sizes: Sequence[Size]) -> float:
    """Predict the seconds of a call at the last of the ascending `sizes`: time smaller ones while they are cheap, and extrapolate in
    proportion to the `work`."""
    seconds = time_once(sizes[0])
    for smaller, size in itertools.pairwise(sizes):
        seconds *= work(size) / work(smaller)
        if seconds <= CHEAP_CALL_S:
            seconds = time_once(size)
    return seconds


@contextlib.contextmanager
def precision(kind: str) -> Iterator[None]:
    """Let float32 products of the block use tf32 on tensor cores if `kind` is tf32, else compute them exactly."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = kind == "tf32"
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


class MachineRates:
    """Rates of this machine, measured at first use, and its datasheet.

    Attributes:
        device: that of `--device`; without one the GPU if there is one, else the CPU.
        kinds: those of DTYPES that it supports.
        card: datasheet; None for a CPU or an unknown GPU.
        best: best TFLOP/s (1e12) of this process so far by kind.
    """

    def __init__(self, device: str | None):
        if device == "cuda" and not torch.cuda.is_available():
            raise UsageError("--device cuda: torch sees no GPU here; use --device cpu.")
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self.best: dict[str, float] = {}
        if self.device.type == "cuda":
            self.device_name = torch.cuda.get_device_name(self.device)
            self.card = find_card(self.device_name)
            recent = torch.cuda.get_device_capability(self.device) >= (8, 0)
            self.kinds = tuple(DTYPES) if recent else ("fp32", "fp16")
        else:
            self.device_name = f"{describe_environment()['cpu_model']}, {torch.get_num_threads()} threads"
            self.card = None
            self.kinds = tuple(kind for kind in DTYPES if kind != "tf32")

    def require(self, kinds: Sequence[str]) -> None:
        for kind in kinds:
            if kind not in self.kinds:
                name = "GPU" if self.device.type == "cuda" else "CPU"
                raise UsageError(f"--dtype {kind}: this {name} does not support it; use {', '.join(self.kinds)}.")

    def best_tflops(self, kind: str, seen: float = 0.0) -> float:
        """Return the best rate so far, of products of PROBE_SIZES and of `seen`, so that no share of it exceeds 1."""
        if kind not in self.best:
            best = 0.0
            with precision(kind):
                for size in PROBE_SIZES[self.device.type]:
                    if best and 2 * size**3 / best / 1e12 > PROBE_CALL_S:
                        break
                    best = max(best, bench_device.matmul_tflops(self.device, DTYPES[kind], size))
            self.best[kind] = best
        self.best[kind] = max(self.best[kind], seen)
        return self.best[kind]

    @functools.cached_property
    def copy_gb_per_s(self) -> float:
        """GB/s (1e9 bytes) of a copy inside the device's memory."""
        return bench_device.device_copy_gb_per_s(self.device)

    def shares(self, kind: str, tflops: float, best: float) -> Row:
        """Return the values of a row that compare `tflops` with the datasheet and with the best measured rate."""
        datasheet = self.card.tflops.get(kind) if self.card else None
        return {
            "of_datasheet": tflops / datasheet.value if datasheet else None,
            "of_measured": tflops / best,
            "best_tflops": best,
        }


def measure_row(row: Row, measure: Callable[..., Row], *args: Any) -> Row:
    """Return `row` with the values of `measure(*args)`, or with an `error` if memory was not sufficient."""
    try:
        return row | measure(*args)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return row | {"error": "out of memory"}


def skip(seconds: float, longest_call_s: float, what: str) -> Row | None:
    """Return the values of a row that is skipped because a call would take longer than the user allows; None for other rows."""
    if seconds <= longest_call_s:
        return None
    return {"skipped": f"{what} is expected to take {seconds:.1f} s, longer than --longest-call {longest_call_s:g}"}


def matmul(args: argparse.Namespace, rates: MachineRates) -> Benchmark:
    """Return a row of [n, n] x [n, n] for every kind and size: `2 n^3 / t`, and its share of the datasheet's rate and of the best one."""
    kinds = args.dtype or rates.kinds
    rates.require(kinds)

    def product(size: int, kind: str) -> Callable[[], object]:
        # random values: zeros are multiplied faster
        left, right = (torch.randn(size, size, device=rates.device).to(DTYPES[kind]) for _ in range(2))
        out = torch.empty_like(left)
        return lambda: torch.mm(left, right, out=out)

    def measure(n: int, kind: str) -> Row:
        doubled = [*itertools.takewhile(lambda size: size < n, (64 << power for power in itertools.count())), n]
        with precision(kind):
            expected_s = predict_s(
                lambda size: once_s(rates.device, product(size, kind)), lambda size: 2 * size**3, doubled
            )
            if skipped := skip(expected_s, args.longest_call, "one product"):
                return skipped
            seconds = median_s(product(n, kind), args.min_run_time)
        tflops = 2 * n**3 / seconds / 1e12
        best = rates.best_tflops(kind, seen=tflops)
        return {"time_s": seconds, "tflops": tflops, **rates.shares(kind, tflops, best)}

    cases = list(itertools.product(kinds, args.sizes))
    return len(cases), (measure_row({"dtype": kind, "n": n}, measure, n, kind) for kind, n in cases)


def elementwise(args: argparse.Namespace, rates: MachineRates) -> Benchmark:
    """Return a row per size of a float32 vector: `n / t` FLOP/s and `8 n / t` bytes/s, and their share of the memory bandwidth."""

    def measure(n: int) -> Row:
        a = torch.randn(n, device=rates.device)
        out = torch.empty_like(a)  # a new one would cost a CPU mostly page faults
        seconds = median_s(lambda: torch.mul(a, 1.2, out=out), args.min_run_time)
        gb_per_s = 8 * n / seconds / 1e9
        return {
            "time_s": seconds,
            "gflops": n / seconds / 1e9,
            "gbps": gb_per_s,
            "of_datasheet": gb_per_s / rates.card.memory.value if rates.card else None,
            "of_measured": gb_per_s / rates.copy_gb_per_s,
        }

    return len(args.sizes), (measure_row({"n": n}, measure, n) for n in args.sizes)


def layer(args: argparse.Namespace, rates: MachineRates) -> Benchmark:
    """Return a row per block, length and batch, in TFLOP/s (1e12) by the formulas of `BlockShape`.

    For blocks whose norms have kernels of this package the rows are repeated with these: times of the whole block, the number of replaced
    norms and the speedup of the forward. Parts such as attention contain no norms, so they are not timed again.
    """
    device, on_gpu = rates.device, rates.device.type == "cuda"
    kind = args.dtype or ("fp16" if on_gpu else "fp32")
    rates.require([kind])
    names = [SHORT.get(name, name) for name in args.blocks or (DEFAULT_BLOCKS if on_gpu else CPU_BLOCKS)]
    families = []
    for name in names:
        config = block_config(name)
        families.append(config.model_type)
        positions = max_positions(config)
        if positions and max(args.seq) > positions:
            raise UsageError(f"--seq {max(args.seq)}: {name} has {positions} positions; shorten it.")
    patch_norms = make_norm_patch(args.norm_kernels, device, families)
    sizes = list(itertools.product(args.seq, args.batch))

    def measure(block: Block, seq: int, batch: int, parts: Sequence[str]) -> Row:
        expected_s = predict_step_s(device, block, seq, batch, kind)
        if skipped := skip(expected_s, args.longest_call, "forward + backward"):
            return skipped
        x = torch.randn(batch, seq, block.shape.hidden, device=device, dtype=DTYPES[kind])
        seconds, tflops = {}, {}
        with torch.no_grad():
            for part in ("layer", *parts):
                seconds[part] = median_s(functools.partial(block.parts[part], x), args.min_run_time)
                tflops[part] = block.shape.operations(part, batch, seq) / seconds[part] / 1e12
        step_s = median_s(forward_and_backward(block, x), args.min_run_time)
        step_tflops = FORWARD_AND_BACKWARD * block.shape.operations("layer", batch, seq) / step_s / 1e12
        best = rates.best_tflops(kind, seen=max(step_tflops, *tflops.values()))
        return {
            "forward_s": seconds["layer"],
            "forward_tflops": tflops["layer"],
            **rates.shares(kind, tflops["layer"], best),
            "forward_backward_s": step_s,
            "forward_backward_tflops": step_tflops,
            **{f"{part}_s": seconds[part] for part in parts},
            **{f"{part}_tflops": tflops[part] for part in parts},
            "attention_of_feed_forward": tflops["attention"] / tflops["feed_forward"] if parts else None,
            "skippable": block.shape.skippable(batch, seq),
        }

    def rows_of(block: Block, norms: str, parts: Sequence[str]) -> Iterator[Row]:
        for seq, batch in sizes:
            row: Row = {"block": block.name, "dtype": kind, "norms": norms, "seq": seq, "batch": batch}
            yield measure_row(row, measure, block, seq, batch, parts)
            if on_gpu:
                torch.cuda.empty_cache()

    def rows() -> Iterator[Row]:
        for name in names:
            with precision(kind):
                block = build_block(name, device, DTYPES[kind])
                plain_s: list[float | None] = []
                for row in rows_of(block, "torch", PARTS):
                    plain_s.append(row.get("forward_s"))
                    yield row
                if patch_norms and (patched := patch_norms(block)):
                    for row, before_s in zip(rows_of(block, "cuda", ()), plain_s):
                        row["norm_modules_patched"] = patched
                        if before_s and "forward_s" in row:
                            row["norm_speedup"] = before_s / row["forward_s"]
                        yield row
            del block  # before the next one is built

    blocks = len(names) + (sum(family_refusal(each) is None for each in families) if patch_norms else 0)
    return blocks * len(sizes), rows()


def predict_step_s(device: torch.device, block: Block, seq: int, batch: int, kind: str) -> float:
    """Predict the seconds of one forward and backward of the block from forwards of fewer tokens."""

    def forward_once(size: tuple[int, int]) -> float:
        x = torch.randn(*size, block.shape.hidden, device=device, dtype=DTYPES[kind])
        with torch.no_grad():
            return once_s(device, lambda: block.parts["layer"](x))

    doubled = [(1 << power, seq) for power in range((batch - 1).bit_length())]
    sizes = [(1, min(FIRST_TOKENS, seq)), *doubled, (batch, seq)]
    return FORWARD_AND_BACKWARD * predict_s(forward_once, lambda size: block.shape.operations("layer", *size), sizes)


def forward_and_backward(block: Block, x: torch.Tensor) -> Callable[[], object]:
    """Return a function that runs the block's forward on `x` [batch, seq, hidden] and computes all gradients."""
    x = x.detach().requires_grad_(True)
    wanted = [x, *block.module.parameters()]
    gradient = torch.randn_like(x)

    def step():
        for each in wanted:
            each.grad = None  # so that the backward pass sets it and does not add to it
        block.parts["layer"](x).backward(gradient)

    return step


def make_norm_patch(norm_kernels: str, device: torch.device, families: Sequence[str]) -> Callable[[Block], int] | None:
    """Return a function that installs our norm kernels in a block and returns the number of norms; None without kernels.

    Raises UsageError: `cuda`, and no block's norms have kernels, or the kernels are unavailable.
    """
    if norm_kernels == "off" or (norm_kernels == "auto" and device.type != "cuda"):
        return None
    known = [family for family in families if family_refusal(family) is None]
    check_norm_kernels_option(norm_kernels, (known or families)[0])
    say = current_progress().say
    unusable = prepare_norm_kernels(norm_kernels, known[0], device, say) if known else None

    def patch(block: Block) -> int:
        reason = family_refusal(block.family) or unusable
        asked = "auto" if reason else norm_kernels  # blocks without kernels are no error if others have them
        facts = apply_norm_kernels(asked, reason, block.module, lambda line: say(f"{block.name}: {line}"), block.family)
        return facts["norm_modules_patched"]

    return patch


@dataclass(frozen=True)
class BlockShape:
    """Widths of a block. Only products count as operations, a multiplication and an addition as two, as in `torch.utils.flop_counter`, and
    causal attention counts in full.

    The classical block (Vaswani et al. 2017: one head size for queries, keys and values, an inner layer of 4 h) needs
    `24 b s h^2 + 4 b h s^2` operations for b sequences of s tokens and hidden size h.

    Attributes:
        hidden: h, of the input and the output.
        query: all query heads together, `heads * head_dim`.
        key: all key heads together; less than `query` with grouped queries. Values are as wide.
        inner: of the feed-forward part.
        matrices: of the feed-forward part: 2, or 3 with a gate.
        causal: whether a token sees only those before it.
    """

    hidden: int
    query: int
    key: int
    inner: int
    matrices: int = 2
    causal: bool = False

    def operations(self, part: str, b: int, s: int) -> int:
        """Return the operations of a part of `Block.parts` for b sequences of s tokens."""
        dense = 2 * b * s * self.hidden * self.inner  # 8 b s h^2 in the classical block
        projections = 2 * b * s * self.hidden * (2 * self.query + 2 * self.key)  # 8 b s h^2
        attention = projections + 4 * b * self.query * s**2  # and the scores, 4 b h s^2
        feed_forward = self.matrices * dense
        counts = {"dense": dense, "dense_activation": dense, "feed_forward": feed_forward, "attention": attention}
        return (counts | {"layer": attention + feed_forward})[part]

    def skippable(self, b: int, s: int) -> float:
        """Return the share of a layer that a causal kernel may skip: scores of `s (s - 1) / 2` pairs of `s^2`; 0 if not causal."""
        return 2 * b * self.query * s * (s - 1) / self.operations("layer", b, s) if self.causal else 0.0


@dataclass(frozen=True)
class Block:
    """A block of a well-known model (transformers' module with random weights) and its parts.

    Attributes:
        family: transformers' model_type, which the module of a block does not have.
        module: the whole block, in eval mode (no dropout), its parameters requiring gradients.
        parts: `layer`, `attention`, `feed_forward`, `dense` (the first matrix of the feed-forward part), `dense_activation`; each takes
            hidden states [batch, seq, hidden] of the block's dtype and device.
    """

    name: str
    family: str
    shape: BlockShape
    module: nn.Module
    parts: dict[str, Call]


# Published dimensions (Devlin et al. 2018, gpt2-medium, the encoder of Raffel et al. 2020); the other blocks are presets of this package.
OWN: dict[str, dict[str, Any]] = {
    "bert-large": dict(model_type="bert", hidden_size=1024, num_attention_heads=16, intermediate_size=4096),
    "gpt2-medium": dict(model_type="gpt2", n_embd=1024, n_head=16, n_layer=24),
    "t5-large": dict(model_type="t5", d_model=1024, d_kv=64, d_ff=4096, num_heads=16, num_layers=24),
}
SHORT = {"opt": "opt-13b", "llama": "llama-3.1-8b"}
DEFAULT_BLOCKS = (*OWN, "opt-13b", "llama-3.1-8b")
CPU_BLOCKS = (*OWN, "opt-1.3b", "llama-3.2-1b")  # a step of opt-13b takes seconds there
CAUSAL = {"bert": False, "gpt2": True, "t5": False, "opt": True, "llama": True}  # by family


def build_parts(config: Any) -> tuple[nn.Module, dict[str, Call]]:
    """Return a block of one of the families of `CAUSAL`, and its parts."""
    block: Any
    calls: tuple[Call, ...]  # layer, attention, feed-forward, its first matrix, its activation
    match config.model_type:
        case "bert":
            from transformers.models.bert.modeling_bert import BertLayer

            block = BertLayer(config, layer_idx=1)
            first = block.intermediate
            calls = (
                block,
                lambda x: block.attention(x)[0],
                block.feed_forward_chunk,
                first.dense,
                first.intermediate_act_fn,
            )
        case "gpt2":
            from transformers.models.gpt2.modeling_gpt2 import GPT2Block

            block = GPT2Block(config, layer_idx=1)
            mlp = block.mlp
            calls = block, lambda x: block.attn(x)[0], mlp, mlp.c_fc, mlp.act
        case "t5":
            from transformers.models.t5.modeling_t5 import T5Block

            block = T5Block(config, layer_idx=1)
            inner = block.layer[-1].DenseReluDense

            @functools.cache
            def bias(seq: int) -> torch.Tensor:  # blocks after the first get the first one's position bias
                weight = inner.wi.weight
                return torch.randn(1, config.num_heads, seq, seq, device=weight.device, dtype=weight.dtype)

            calls = (
                lambda x: block(x, position_bias=bias(x.shape[1]))[0],
                lambda x: block.layer[0](x, position_bias=bias(x.shape[1]))[0],
                block.layer[-1],
                inner.wi,
                inner.act,
            )
        case "opt":
            from transformers.models.opt.modeling_opt import OPTDecoderLayer

            block = OPTDecoderLayer(config, layer_idx=1)
            calls = (
                block,
                lambda x: block.self_attn(x)[0],
                lambda x: block.fc2(block.activation_fn(block.fc1(x))),
                block.fc1,
                block.activation_fn,
            )
        case "llama":
            from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

            block, rotary = LlamaDecoderLayer(config, layer_idx=1), LlamaRotaryEmbedding(config)

            @functools.cache
            def angles(seq: int):  # a model computes them once for all blocks
                weight = block.mlp.gate_proj.weight
                return rotary(weight, torch.arange(seq, device=weight.device)[None])

            calls = (
                lambda x: block(x, position_embeddings=angles(x.shape[1])),
                lambda x: block.self_attn(x, position_embeddings=angles(x.shape[1]))[0],
                block.mlp,
                block.mlp.gate_proj,
                block.mlp.act_fn,
            )
    layer, attention, feed_forward, dense, activation = calls
    parts = {"layer": layer, "attention": attention, "feed_forward": feed_forward, "dense": dense}
    return block, parts | {"dense_activation": lambda x: activation(dense(x))}


def block_config(name: str) -> Any:
    """Return the transformers config of block `name`. Raises UsageError for a name that is no block."""
    from transformers import AutoConfig

    name = SHORT.get(name, name)
    if name in OWN:
        return AutoConfig.for_model(**OWN[name])
    preset = find_preset(name)
    if preset is None or preset.config["model_type"] not in CAUSAL:
        raise UsageError(
            f"--blocks {name}: there is no such block; take {', '.join((*DEFAULT_BLOCKS, *SHORT))}, "
            "or a preset of the OPT and Llama families."
        )
    return preset.to_config()


def build_block(name: str, device: torch.device, dtype: torch.dtype) -> Block:
    """Return block `name` with seeded random weights on `device` in `dtype`."""
    config = block_config(name)
    config._attn_implementation = "sdpa"  # what from_pretrained chooses for all of these families
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)  # an opt-175b block in float32 first would need twice the memory
    try:
        with torch.device(device):
            module, parts = build_parts(config)
    finally:
        torch.set_default_dtype(before)
    heads, family = config.num_attention_heads, config.model_type
    inner = (getattr(config, name, None) for name in ("intermediate_size", "ffn_dim", "d_ff", "n_inner"))
    shape = BlockShape(
        hidden=config.hidden_size,
        query=heads * (getattr(config, "head_dim", None) or config.hidden_size // heads),
        key=kv_width(config),
        inner=next((size for size in inner if isinstance(size, int)), 4 * config.hidden_size),
        matrices=3 if family == "llama" else 2,
        causal=CAUSAL[family],
    )
    return Block(name, family, shape, module.eval(), parts)
