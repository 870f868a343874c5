"""Micro-benchmarks: operations against torch's counter, rates by a clock of the test's own, the table of cards, the command."""

from __future__ import annotations

import csv
import functools
import io
import json
import math
import os
import re
import subprocess
import sys
import time

import pytest
import torch
from conftest import ROOT
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from zero_inference.cli import console_main
from zero_inference.errors import RunError, UsageError
from zero_inference.hardware import spec
from zero_inference.micro import blocks, command, elementwise, layer, matmul, timing
from zero_inference.micro.blocks import BlockShape
from zero_inference.micro.layer import make_norm_patch
from zero_inference.utils.progress import Progress, use_progress
from zero_inference.utils.tables import Column, RowPrinter, render

CPU = torch.device("cpu")
SMALL = {
    "bert": dict(model_type="bert", hidden_size=48, num_attention_heads=4, intermediate_size=112),
    "gpt2": dict(model_type="gpt2", n_embd=48, n_head=4),
    "gpt2 inner": dict(model_type="gpt2", n_embd=48, n_head=4, n_inner=80),
    "t5": dict(model_type="t5", d_model=48, d_kv=20, d_ff=112, num_heads=4),
    "opt": dict(model_type="opt", hidden_size=48, ffn_dim=112, num_attention_heads=4),
    "llama": dict(
        model_type="llama", hidden_size=48, intermediate_size=112, num_attention_heads=6, num_key_value_heads=2
    ),
    "llama wide": dict(
        model_type="llama",
        hidden_size=48,
        intermediate_size=112,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=24,
    ),
}


def small_block(name: str, device=CPU, dtype=torch.float32) -> blocks.Block:
    from transformers import AutoConfig

    return blocks.build_block(name, device, dtype, AutoConfig.for_model(**SMALL[name]))


def counted(action) -> int:
    """Operations by torch's counter; attention as plain products, as the CPU's fused one is not in its table."""
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        action()
    return counter.get_total_flops()


PARTS = {
    "layer": "forward",
    "attention": "attention",
    "feed_forward": "feed_forward",
    "dense": "dense",
    "dense_activation": "dense",
}


@pytest.mark.parametrize("name", SMALL)
def test_formulas_are_what_the_counter_counts(name):
    block, batch, seq = small_block(name), 3, 7
    x = torch.randn(batch, seq, block.shape.hidden)
    with torch.no_grad():
        block.parts["layer"](
            x
        )  # keeps the angles of rotary positions, which no block computes and some transformers multiply out
        for part, formula in PARTS.items():
            assert counted(lambda part=part: block.parts[part](x)) == getattr(block.shape, formula)(batch, seq), part
            assert block.parts[part](x).shape[:2] == (batch, seq)
    step = layer.forward_and_backward(block, x)
    assert counted(step) == blocks.FORWARD_AND_BACKWARD * block.shape.forward(batch, seq)
    assert all(parameter.grad is not None for parameter in block.module.parameters())


@pytest.mark.parametrize("name", [*blocks.DEFAULT_BLOCKS, *blocks.CPU_BLOCKS[3:], *blocks.SHORT])
def test_formulas_of_the_published_sizes(name):
    """On the meta device, where nothing is computed."""
    meta = torch.device("meta")
    block = blocks.build_block(name, meta, torch.float16)
    x = torch.empty(2, 128, block.shape.hidden, device=meta, dtype=torch.float16)
    with torch.no_grad():
        block.parts["layer"](x)  # keeps the angles of rotary positions, as above
        for part, formula in PARTS.items():
            assert counted(lambda part=part: block.parts[part](x)) == getattr(block.shape, formula)(2, 128), part


@pytest.mark.parametrize("name", ["bert-large", "gpt2-medium", "t5-large", "opt-13b"])
def test_classical_blocks_have_the_classical_formula(name):
    shape, b, s = blocks.shape_of(blocks.block_config(name)), 4, 512
    h = shape.hidden
    assert shape.forward(b, s) == 24 * b * s * h**2 + 4 * b * h * s**2
    assert shape.attention(b, s) == 4 * b * h * s**2 + 8 * b * s * h**2
    assert shape.feed_forward(b, s) == 16 * b * s * h**2 and shape.dense(b, s) == 8 * b * s * h**2


def by_the_reference(*_) -> None:
    """No kernel runs here: what would be tried on the device is taken as good."""


class Clock:
    """Calls that take the given seconds, one after the other, and the clock that they are timed with."""

    def __init__(self, monkeypatch, *call_s: float):
        self.now, self.left = 0.0, list(call_s)
        monkeypatch.setattr(timing.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)

    def __call__(self) -> None:
        self.now += self.left.pop(0)


@pytest.mark.parametrize(
    "device, call_s, expected, left",
    [
        ("cpu", [0.3, 0.003, 0.002, 0.001], 0.002, 1),
        ("cpu", [0.3, 0.3, 0.1], 0.3, 1),
        ("cpu", [9.0, 0.001], 9.0, 1),
        ("cuda", [9.0, 0.003, 0.001, 0.002, 0.1], 0.001, 1),
        ("cuda", [9.0, 0.6, 0.1], 0.6, 1),
    ],
)
def test_a_call_is_timed_behind_what_only_the_first_of_a_gpu_takes(device, call_s, expected, left, monkeypatch):
    with monkeypatch.context() as patch:
        clock = Clock(patch, *call_s)
        found = timing.once_s(torch.device(device), clock)
    assert found == pytest.approx(expected) and len(clock.left) == left


def test_matmul_formula_and_causal_share():
    assert counted(lambda: torch.randn(17, 17) @ torch.randn(17, 17)) == matmul.matmul_operations(17)
    causal, full = (BlockShape(8, 8, 8, 32, causal=causal) for causal in (True, False))
    pairs = sum(query for query in range(5))  # of 5 tokens each leaves out those behind it
    assert (
        causal.skippable(3, 5) == pytest.approx(3 * 4 * 8 * pairs / causal.forward(3, 5)) and full.skippable(3, 5) == 0
    )


def test_blocks_are_seeded_and_on_the_device_in_the_dtype():
    one, two = (small_block("llama", dtype=torch.bfloat16).module.state_dict() for _ in range(2))
    assert all(torch.equal(one[key], two[key]) and one[key].dtype == torch.bfloat16 for key in one)
    assert torch.get_default_dtype() == torch.float32
    with pytest.raises(UsageError, match="--blocks mixtral-8x7b.*bert-large"):
        blocks.block_config("mixtral-8x7b")


@pytest.mark.parametrize(
    "cuda_name, name",
    [
        ("NVIDIA H200", "H200 SXM"),
        ("NVIDIA H200 NVL", "H200 NVL"),
        ("NVIDIA H100 80GB HBM3", "H100 SXM"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA H100 NVL", "H100 NVL"),
        ("NVIDIA A100-SXM4-80GB", "A100 SXM 80 GB"),
        ("NVIDIA A100-SXM4-40GB", "A100 SXM 40 GB"),
        ("NVIDIA A100 80GB PCIe", "A100 PCIe 80 GB"),
        ("NVIDIA A100-PCIE-40GB", "A100 PCIe 40 GB"),
        ("Tesla V100-SXM2-16GB", "V100 SXM2"),
        ("Tesla V100-PCIE-32GB", "V100 PCIe"),
        ("Tesla V100S-PCIE-32GB", "V100S PCIe"),
        ("NVIDIA RTX A6000", "RTX A6000"),
        ("NVIDIA GeForce RTX 3090", "RTX 3090"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("NVIDIA GeForce RTX 5090", "RTX 5090"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA A10", "A10"),
        ("Tesla T4", "T4"),
        ("NVIDIA B200", "B200"),
        ("NVIDIA GeForce RTX 3090 Ti", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA L40", None),
        ("NVIDIA A10G", None),
        ("NVIDIA GB200", None),
        ("", None),
    ],
)
def test_cards_by_the_name_that_cuda_gives(cuda_name, name):
    card = spec.find_card(cuda_name)
    assert (card and card.name) == name


def test_every_rate_has_a_source_and_a_likely_size():
    for card in spec.cards():
        assert 300 <= card.memory.value <= 8000 and card.memory.source
        assert {"fp32", "fp16"} <= set(card.tflops)
        for rate in card.tflops.values():
            assert 8 < rate.value <= 2250 and rate.source
        if "bf16" in card.tflops:  # since Ampere: both 16-bit types alike, tf32 half of them
            assert card.tflops["bf16"] == card.tflops["fp16"]
            assert card.tflops["tf32"].value == pytest.approx(card.tflops["fp16"].value / 2, rel=0.03)


def test_memory_is_what_is_left_by_error_correction():
    """nvidia-smi says 40960 MiB of an A100 of 40 GB, 15360 of a T4 and 46068 of an L40S."""
    by_name = {card.name: card.memory_bytes for card in spec.cards()}
    assert by_name["A100 SXM 40 GB"] == 40960 << 20 and by_name["T4"] == 15360 << 20
    assert by_name["L40S"] == pytest.approx(46068 << 20, rel=0.001) and by_name["V100 SXM2"] is None


def test_a_machine_of_known_rate(monkeypatch):
    """A product that takes 50 ms by the clock comes out at 2 n^3 / 50 ms, and is the one that was asked for."""
    clock, products = [0.0], set()

    def product(left, right, out):
        clock[0] += 0.05
        products.add((left.shape, right.shape, out.shape, left.dtype, right.dtype, out.dtype))

    monkeypatch.setattr(torch, "mm", product)
    monkeypatch.setattr(timing, "Timer", functools.partial(timing.Timer, timer=lambda: clock[0]))
    assert matmul.time_matmul(CPU, 100, "bf16", min_run_time=0.4) == pytest.approx(0.05)
    assert products == {((100, 100),) * 3 + (torch.bfloat16,) * 3} and clock[0] > 0.4


def test_shares_are_of_the_best_rate_seen():
    """A first product that came out slow, as on a busy machine, is no ceiling."""
    rates = timing.MachineRates(CPU, matmul_tflops={"fp32": 1e-9, "bf16": 1e-9})
    rows = list(matmul.measure(rates, [16, 256, 32], ["fp32"], 0.02, math.inf))
    best = 1e-9
    for row in rows:
        best = max(best, row["tflops"])
        assert (
            row["best_tflops"] == best
            and row["of_measured"] == pytest.approx(row["tflops"] / best)
            and row["of_measured"] <= 1
        )
    (row,) = layer.measure(rates, ["opt"], [8], [2], "bf16", 0.01, math.inf, build=small_block)
    assert row["best_tflops"] == max(row[key] for key in row if key.endswith("_tflops")) and row["of_measured"] <= 1


def test_the_first_rate_is_the_best_of_the_sizes_that_are_quick_enough(monkeypatch):
    asked = []

    def tflops(device, dtype, size):
        asked.append(size)
        return {256: 2e-3, 512: 3e-3}[size]

    monkeypatch.setattr(timing.bench_device, "matmul_tflops", tflops)
    assert timing.MachineRates(CPU).matmul_tflops("fp16") == 3e-3 and asked == [
        256,
        512,
    ]  # 1024 takes 0.7 s at that rate


def test_what_would_take_too_long_is_predicted_and_not_begun(monkeypatch, capsys):
    """A product that takes n^3 nanoseconds: 8.6 s at 2048, and less than a second for all that is done."""
    sizes = []

    def slow(left, right, out):
        sizes.append(len(left))
        time.sleep(len(left) ** 3 * 1e-9)

    monkeypatch.setattr(torch, "mm", slow)
    monkeypatch.setitem(timing.PROBE_SIZES, "cpu", (16,))
    argv = [
        *"zero-inference micro matmul --device cpu --sizes 128 2048".split(),
        *"--dtype fp16 --format csv --min-run-time 0.01".split(),
    ]
    assert console_main(argv) == 0
    good, skipped = csv.DictReader(io.StringIO(capsys.readouterr().out))
    assert float(good["tflops"]) > 0 and max(sizes) == 512
    assert skipped["tflops"] == "" and skipped["skipped"].startswith("one product is expected to take ")
    assert skipped["skipped"].endswith(" s, longer than --longest-call 3")


def test_long_calls_are_predicted_from_the_work():
    seen = []

    def once(size):
        seen.append(size)
        return size**2 / 100

    assert timing.predicted_s(once, lambda size: size**2, [1, 2, 4, 8, 16]) == pytest.approx(2.56) and seen == [1, 2, 4]
    assert timing.predicted_s(once, lambda size: size**2, [3]) == pytest.approx(0.09)
    block, sizes = small_block("llama"), []
    block.parts["layer"] = lambda x: sizes.append(x.shape[:2])
    layer.predicted_step_s(CPU, block, 33, 5, "fp32")
    assert list(dict.fromkeys(sizes)) == [(1, 16), (1, 33), (2, 33), (4, 33), (5, 33)]


@pytest.mark.slow
def test_the_default_of_layer_ends_within_three_minutes_on_a_gpu(monkeypatch):
    """As many blocks, lengths and batches as the default has, all measured, but small: the figures are counted where torch times
    them, and each takes the second at most that blocked_autorange adds to what is asked."""
    asked, timed = [], timing.Timer.blocked_autorange

    def counting(self, *, min_run_time):
        asked.append(min_run_time)
        return timed(self, min_run_time=min_run_time)

    monkeypatch.setattr(timing.Timer, "blocked_autorange", counting)
    names = ["bert", "gpt2", "t5", "opt", "llama"]
    assert [blocks.block_config(name).model_type for name in blocks.DEFAULT_BLOCKS] == names
    seqs, batches = (3, 5)[: len(command.LAYER_SEQS["cuda"])], (1, 2)[: len(command.LAYER_BATCHES["cuda"])]
    assert (len(seqs), len(batches)) == (len(command.LAYER_SEQS["cuda"]), len(command.LAYER_BATCHES["cuda"]))
    rates, patch = timing.MachineRates(CPU), make_norm_patch("cuda", CPU, torch.float32, names, by_the_reference)
    rows = list(layer.measure(rates, names, seqs, batches, "fp32", 1e-3, math.inf, patch, small_block))
    assert len(rows) == 28 and all(row["forward_s"] > 0 and row["forward_backward_s"] > 0 for row in rows)
    assert {row["block"] for row in rows if row["norms"] == "cuda"} == {"opt", "llama"}
    assert len(asked) == 136 and set(asked) == {1e-3} and len(asked) * (command.LAYER_MIN_RUN_TIME_S + 1) < 180


@pytest.mark.parametrize("format", ["table", "md", "csv", "json"])
def test_a_row_is_shown_before_the_next_is_measured(format, monkeypatch, capsys):
    shown, time_matmul = [], matmul.time_matmul

    def watching(*arguments):
        shown.append(capsys.readouterr())
        return time_matmul(*arguments)

    monkeypatch.setattr(matmul, "time_matmul", watching)
    monkeypatch.setitem(timing.PROBE_SIZES, "cpu", (16,))
    argv = [
        *"zero-inference micro matmul --device cpu --sizes 16 77 99 --dtype fp32 --format".split(),
        format,
        "--min-run-time",
        "0.01",
    ]
    assert console_main(argv) == 0
    rest = capsys.readouterr()
    texts = [each.err if format == "json" else each.out for each in (*shown, rest)]
    assert [re.findall(r"fp32[ |,]+(?:n )?(\d+)", text) for text in texts] == [[], ["16"], ["77"], ["99"]]
    if format == "json":
        assert [row["n"] for row in json.loads(rest.out)["rows"]] == [16, 77, 99]
    else:
        assert "measured" in texts[1] and "measured" not in texts[2], "one head"


def test_rows_one_by_one_are_the_table_of_all(capsys):
    columns = [Column("name", "a long header", dtype="string"), Column("value", "x", str)]
    rows = [{"name": "one|two", "value": 12345678}, {"name": "a", "value": None}]
    printed = {}
    for format in ("csv", "md", "table"):
        printer = RowPrinter(columns, format)
        for row in rows:
            printer.add(row)
        printed[format] = capsys.readouterr().out
    assert printed["csv"] == render(rows, columns, "csv")
    cells = [[cell.strip(" :-") for cell in line.split(" | ")] for line in printed["md"].splitlines()]
    expected = [[cell.strip(" :-") for cell in line.split(" | ")] for line in render(rows, columns, "md").splitlines()]
    assert [row for row in cells if row != cells[1]] == [row for row in expected if row != expected[1]]
    assert printed["md"].splitlines()[1] == "|:--------|--------:|"
    assert printed["table"].splitlines() == [
        "a long",
        "header         x",
        "-------  -------",
        "one|two  12345678",
        "a              -",
    ]


def test_rows_follow_from_the_time():
    card = spec.Card("a card", (), tflops={"fp16": spec.Rate(0.5, "")}, memory=spec.Rate(40.0, ""))
    rates = timing.MachineRates(CPU, {"bf16": 0.25, "fp16": 0.25}, copy_gb_per_s=20.0, card=card)
    (row,) = elementwise.measure(rates, [1 << 12], 0.02)
    assert row["gflops"] == pytest.approx(4096 / row["time_s"] / 1e9) and row["gbps"] == pytest.approx(
        8 * row["gflops"]
    )
    assert row["of_measured"] == pytest.approx(row["gbps"] / 20) and row["of_datasheet"] == pytest.approx(
        row["gbps"] / 40
    )
    (row,) = matmul.measure(rates, [33], ["bf16"], 0.02, math.inf)
    assert row["tflops"] == pytest.approx(2 * 33**3 / row["time_s"] / 1e12)
    assert row["of_measured"] == pytest.approx(row["tflops"] / 0.25) and row["of_datasheet"] is None
    (row,) = matmul.measure(rates, [33], ["fp16"], 0.02, math.inf)
    assert row["of_datasheet"] == pytest.approx(row["tflops"] / 0.5)


def test_a_layer_and_what_other_norms_change(monkeypatch):
    class PlainNorm(torch.nn.Module):
        def __init__(self, norm):
            super().__init__()
            self.weight, self.bias, self.eps = norm.weight, norm.bias, norm.eps

        def forward(self, x):
            mean, variance = x.mean(-1, keepdim=True), x.var(-1, unbiased=False, keepdim=True)
            return (x - mean) * torch.rsqrt(variance + self.eps) * self.weight + self.bias

    def patch(block) -> int:
        norms = [
            (parent, name, child)
            for parent in block.module.modules()
            for name, child in parent.named_children()
            if isinstance(child, torch.nn.LayerNorm)
        ]
        for parent, name, child in norms:
            setattr(parent, name, PlainNorm(child))
        return len(norms)

    rates = timing.MachineRates(CPU)
    rows = list(layer.measure(rates, ["opt"], [8], [1, 2], "fp32", 0.01, math.inf, patch, small_block))
    assert [(row["norms"], row["batch"]) for row in rows] == [("torch", 1), ("torch", 2), ("cuda", 1), ("cuda", 2)]
    for plain, patched in zip(rows[:2], rows[2:]):
        assert patched["norm_modules_patched"] == 2 and "dense_tflops" not in patched
        assert (
            patched["norm_speedup"] == pytest.approx(plain["forward_s"] / patched["forward_s"])
            and "norm_speedup" not in plain
        )
        shape = small_block("opt").shape
        assert plain["forward_tflops"] == pytest.approx(shape.forward(plain["batch"], 8) / plain["forward_s"] / 1e12)
        step = 3 * shape.forward(plain["batch"], 8)
        assert plain["forward_backward_tflops"] == pytest.approx(step / plain["forward_backward_s"] / 1e12)
        assert plain["attention_of_feed_forward"] == pytest.approx(
            plain["attention_tflops"] / plain["feed_forward_tflops"]
        )


@pytest.fixture
def told():
    with use_progress(Progress(True)):
        yield


@pytest.mark.parametrize("name", ["llama", "opt"])
def test_norm_kernels_patch_a_block_alone(name, capsys, told):
    patch = make_norm_patch("cuda", CPU, torch.float32, ["bert", name], by_the_reference)
    plain, patched = small_block(name), small_block(name)
    x = torch.randn(2, 7, plain.shape.hidden)
    assert patch(patched) == 2 and "2 norms" in capsys.readouterr().err
    assert [module for module in patched.module.modules() if "forward" in module.__dict__]
    with torch.no_grad():
        torch.testing.assert_close(patched.parts["layer"](x), plain.parts["layer"](x))
    rows = list(
        layer.measure(timing.MachineRates(CPU), [name, "bert"], [8], [1], "fp32", 0.01, math.inf, patch, small_block)
    )
    assert [(row["block"], row["norms"], row.get("norm_modules_patched")) for row in rows] == [
        (name, "torch", None),
        (name, "cuda", 2),
        ("bert", "torch", None),
    ]
    assert (
        "bert: norms use transformers' implementation: the family bert is not in the table" in capsys.readouterr().err
    )


def test_norm_kernels_that_can_patch_nothing_are_an_error():
    with pytest.raises(UsageError, match="--norm-kernels cuda: the family bert is not in the table"):
        make_norm_patch("cuda", CPU, torch.float32, ["bert", "t5"], by_the_reference)
    block = small_block("llama")
    block.module.input_layernorm = torch.nn.RMSNorm(48)
    with pytest.raises(RunError, match="--norm-kernels cuda: llama with a .*RMSNorm is not in the table"):
        make_norm_patch("cuda", CPU, torch.float32, ["llama"], by_the_reference)(block)


def test_what_does_not_fit_is_a_row_that_says_so(monkeypatch, capsys):
    def mm(left, right, out):
        if left.shape[0] > 16:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return torch.matmul(left, right)

    monkeypatch.setattr(torch, "mm", mm)
    monkeypatch.setitem(timing.PROBE_SIZES, "cpu", (16,))
    argv = [
        *"zero-inference micro matmul --device cpu --sizes 16 32".split(),
        *"--dtype fp32 --format csv --min-run-time 0.01".split(),
    ]
    assert console_main(argv) == 1
    shown = capsys.readouterr()
    good, bad = csv.DictReader(io.StringIO(shown.out))
    assert float(good["tflops"]) > 0 and bad["error"] == "out of memory" and bad["tflops"] == ""
    assert "1 of 2 rows were not measured" in shown.err


def micro(*options) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "zero_inference", "micro", *map(str, options)],
        capture_output=True,
        text=True,
        timeout=180,
        cwd=ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )


def test_the_table_of_layer_fits_100_columns_and_says_what_it_leaves_out():
    """Also with the columns that a GPU of a known card and norm kernels add."""
    every = [*(each for each in layer.COLUMNS if each.name not in ("skipped", "error")), command.NOT_MEASURED]
    shown, hidden = command._hide_columns(every, layer.LEAST_SHOWN, 100)
    printer = RowPrinter(shown, "table", gap=1)
    assert printer.width <= 100 and max(map(len, printer._head())) <= 100
    names = [column.name for column in shown]
    assert {"forward_s", "of_datasheet", "feed_forward_tflops", "attention_tflops", "norm_speedup"} <= set(names)
    assert sorted([*hidden, *(column.header for column in shown)]) == sorted(column.header for column in every)
    assert command._hide_columns(every, layer.LEAST_SHOWN, 400) == (every, [])


def test_the_command_prints_and_draws(copied_runs, tmp_path):
    done = micro(
        *"layer --blocks bert-large llama-3.2-1b --seq 8 16".split(),
        *"--batch 1 --min-run-time 0.01 --format json --plot".split(),
        tmp_path / "layer.png",
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert [(row["block"], row["seq"]) for row in report["rows"]] == [
        ("bert-large", 8),
        ("bert-large", 16),
        ("llama-3.2-1b", 8),
        ("llama-3.2-1b", 16),
    ]
    assert report["card"] is None and report["device"] == "cpu" and report["rows"][2]["skippable"] > 0
    for row in report["rows"][:2]:  # CONTRACT, section 8, for bert-large
        b, s, h = row["batch"], row["seq"], 1024
        work = {
            "forward": 24 * b * s * h**2 + 4 * b * h * s**2,
            "forward_backward": 3 * (24 * b * s * h**2 + 4 * b * h * s**2),
            "dense": 8 * b * s * h**2,
            "dense_activation": 8 * b * s * h**2,
            "feed_forward": 16 * b * s * h**2,
            "attention": 4 * b * h * s**2 + 8 * b * s * h**2,
        }
        for part, operations in work.items():
            assert row[f"{part}_s"] > 0 and row[f"{part}_tflops"] == pytest.approx(operations / row[f"{part}_s"] / 1e12)
        assert row["attention_of_feed_forward"] == pytest.approx(row["attention_tflops"] / row["feed_forward_tflops"])
        assert row["forward_s"] < row["forward_backward_s"] and row["of_measured"] <= 1
    assert (tmp_path / "layer.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_tables_of_the_command(tmp_path, capsys):
    for name, options in (("matmul", ["--sizes", "16", "33"]), ("elementwise", ["--sizes", "100", "3000"])):
        plot = tmp_path / f"{name}.png"
        argv = [
            "zero-inference",
            "micro",
            name,
            "--device",
            "cpu",
            *options,
            *"--min-run-time 0.01 --format md --plot".split(),
            str(plot),
        ]
        assert console_main(argv) == 0
        out = capsys.readouterr().out
        assert (
            out.startswith("|") and "of measured" in out and "of datasheet" not in out and plot.stat().st_size > 10_000
        )


@pytest.mark.parametrize(
    "options, words",
    [
        (["matmul", "--device", "cpu", "--dtype", "tf32"], "--dtype tf32: this CPU does not support it"),
        (["layer", "--device", "cpu", "--norm-kernels", "cuda"], "there is no CUDA device"),
        (
            ["layer", "--device", "cpu", "--norm-kernels", "cuda", "--blocks", "t5-large"],
            "the family t5 is not in the table",
        ),
        (["layer", "--device", "cpu", "--blocks", "opt-66c"], "--blocks opt-66c: there is no such block"),
        (["layer", "--device", "cpu", "--blocks", "bert-large", "--seq", "1024"], "bert-large has 512 positions"),
        (["matmul", "--plot", "figure.svg"], "plots are PNG files"),
        (["matmul", "--plot", "no/such/folder/figure.png"], "name another file, in a folder that can be written"),
        (["matmul", "--sizes", "0"], "0 is less than 1"),
        (["elementwise", "--min-run-time", "-1"], "not a time above 0"),
        (["sort"], "there is no command sort; choose one of matmul, elementwise, layer"),
    ],
)
def test_bad_usage(options, words, capsys):
    try:
        code = console_main(["zero-inference", "micro", *options])
    except SystemExit as left:
        code = left.code
    shown = capsys.readouterr()
    assert code == 2 and words in shown.err and not shown.out


def test_help_answers_without_torch():
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "zero_inference", "micro", "layer", "--help"],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
    )
    assert done.returncode == 0 and "--norm-kernels" in done.stdout
    assert not any(
        line.rsplit("|", 1)[-1].strip() in ("torch", "matplotlib", "pandas") for line in done.stderr.splitlines()
    )
