"""Micro-benchmarks: operations against torch's counter, rates by a clock of the test's own, the table of cards, the command."""

from __future__ import annotations

import argparse
import csv
import functools
import io
import itertools
import json
import math
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
from zero_inference.micro import benchmarks
from zero_inference.micro.benchmarks import BlockShape, build_block, make_norm_patch

CPU = torch.device("cpu")
WIDTHS = dict(hidden_size=48, intermediate_size=112, num_attention_heads=6)
SMALL = {
    "bert": dict(model_type="bert", hidden_size=48, num_attention_heads=4, intermediate_size=112),
    "gpt2": dict(model_type="gpt2", n_embd=48, n_head=4),
    "gpt2 inner": dict(model_type="gpt2", n_embd=48, n_head=4, n_inner=80),
    "t5": dict(model_type="t5", d_model=48, d_kv=20, d_ff=112, num_heads=4),
    "opt": dict(model_type="opt", hidden_size=48, ffn_dim=112, num_attention_heads=4),
    "llama": dict(model_type="llama", **WIDTHS, num_key_value_heads=2),
    "llama wide": dict(model_type="llama", **WIDTHS, num_key_value_heads=3, head_dim=24),
}


@pytest.fixture
def small(monkeypatch):
    """Blocks are those of `SMALL`."""
    from transformers import AutoConfig

    monkeypatch.setattr(benchmarks, "SHORT", {})
    monkeypatch.setattr(benchmarks, "block_config", lambda name: AutoConfig.for_model(**SMALL[name]))


def rows_of(benchmark, rates, **options) -> list[dict]:
    default = dict(dtype=None, min_run_time=0.01, longest_call=math.inf, norm_kernels="off")
    number, rows = benchmark(argparse.Namespace(**default | options), rates)
    found = list(rows)
    assert len(found) == number
    return found


def known_rates(**best: float) -> benchmarks.MachineRates:
    rates = benchmarks.MachineRates("cpu")
    rates.best |= best
    return rates


def counted(action) -> int:
    """Operations by torch's counter; attention as plain products, as the CPU's fused one is not in its table."""
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        action()
    return counter.get_total_flops()


def check_formulas(block: benchmarks.Block, x: torch.Tensor) -> None:
    batch, seq, _ = x.shape
    with torch.no_grad():
        block.parts["layer"](x)  # keeps the angles of rotary positions, which some transformers multiply out
        for part in ("layer", *benchmarks.PARTS):
            assert counted(lambda part=part: block.parts[part](x)) == block.shape.operations(part, batch, seq), part
            assert block.parts[part](x).shape[:2] == (batch, seq)


@pytest.mark.parametrize("name", SMALL)
def test_formulas_are_what_the_counter_counts(name, small):
    block = build_block(name, CPU, torch.float32)
    x = torch.randn(3, 7, block.shape.hidden)
    check_formulas(block, x)
    step = benchmarks.forward_and_backward(block, x)
    assert counted(step) == benchmarks.FORWARD_AND_BACKWARD * block.shape.operations("layer", 3, 7)
    assert all(parameter.grad is not None for parameter in block.module.parameters())


@pytest.mark.parametrize("name", [*benchmarks.DEFAULT_BLOCKS, *benchmarks.CPU_BLOCKS[3:], *benchmarks.SHORT])
def test_formulas_of_the_published_sizes(name):
    """On the meta device, where nothing is computed; the classical blocks have the formulas of CONTRACT, section 8."""
    meta, b, s = torch.device("meta"), 2, 128
    block = build_block(name, meta, torch.float16)
    h, shape = block.shape.hidden, block.shape
    check_formulas(block, torch.empty(b, s, h, device=meta, dtype=torch.float16))
    if not name.startswith("llama"):
        scores, dense = 4 * b * h * s**2, 8 * b * s * h**2
        counts = {"layer": 3 * dense + scores, "attention": dense + scores, "feed_forward": 2 * dense, "dense": dense}
        assert {part: shape.operations(part, b, s) for part in counts} == counts


def test_causal_share_and_seeded_blocks_in_the_dtype(small):
    causal, full = (BlockShape(8, 8, 8, 32, causal=causal) for causal in (True, False))
    pairs = sum(range(5))  # of 5 tokens each leaves out those after it
    assert causal.skippable(3, 5) == pytest.approx(3 * 4 * 8 * pairs / causal.operations("layer", 3, 5))
    assert full.skippable(3, 5) == 0
    one, two = (build_block("llama", CPU, torch.bfloat16).module.state_dict() for _ in range(2))
    assert all(torch.equal(one[key], two[key]) and one[key].dtype == torch.bfloat16 for key in one)
    assert torch.get_default_dtype() == torch.float32


CARDS = """
    NVIDIA H200 = H200 SXM | NVIDIA H200 NVL = H200 NVL | NVIDIA H100 80GB HBM3 = H100 SXM | NVIDIA H100 PCIe = H100 PCIe
    NVIDIA A100-SXM4-80GB = A100 SXM 80 GB | NVIDIA A100-SXM4-40GB = A100 SXM 40 GB | NVIDIA A100 80GB PCIe = A100 PCIe 80 GB
    Tesla V100-SXM2-16GB = V100 SXM2 | Tesla V100S-PCIE-32GB = V100S PCIe | NVIDIA RTX A6000 = RTX A6000
    NVIDIA GeForce RTX 4090 = RTX 4090 | NVIDIA L40S = L40S | NVIDIA L4 = L4 | Tesla T4 = T4 | NVIDIA B200 = B200
    NVIDIA GeForce RTX 3090 Ti = | NVIDIA GeForce RTX 4090 Laptop GPU = | NVIDIA H100 80GB HBM3 MIG 1g.10gb = | NVIDIA A10G =
"""


def test_cards_by_the_name_that_cuda_gives():
    for entry in CARDS.replace("\n", "|").split("|"):
        cuda_name, _, name = map(str.strip, entry.partition("="))
        card = spec.find_card(cuda_name)
        assert (card.name if card else "") == name, cuda_name


def test_a_machine_of_known_rate(monkeypatch):
    """A product that takes 50 ms by the clock comes out at 2 n^3 / 50 ms, and is the one that was asked for."""
    clock, products = [0.0], set()

    def product(left, right, out):
        clock[0] += 0.05
        products.add((left.shape, right.shape, out.shape, left.dtype, right.dtype, out.dtype))

    monkeypatch.setattr(torch, "mm", product)
    monkeypatch.setattr(benchmarks, "Timer", functools.partial(benchmarks.Timer, timer=lambda: clock[0]))
    (row,) = rows_of(benchmarks.matmul, known_rates(bf16=1e-9), sizes=[100], dtype=["bf16"], min_run_time=0.4)
    assert row["time_s"] == pytest.approx(0.05) and row["tflops"] == pytest.approx(2e6 / 0.05 / 1e12)
    assert ((100, 100),) * 3 + (torch.bfloat16,) * 3 in products and clock[0] > 0.4


def test_shares_follow_from_the_time_and_the_best_rate_seen(small):
    """A first product that came out slow, as on a busy machine, is no ceiling."""
    rates = known_rates(fp32=1e-9, bf16=1e-9)
    rates.card = spec.Card("a card", (), {"fp32": spec.Figure(0.5, "")}, spec.Figure(40.0, ""), None, None)
    rates.copy_gb_per_s = 20.0
    best = 1e-9
    for row in rows_of(benchmarks.matmul, rates, sizes=[16, 256, 32], dtype=["fp32"]):
        assert row["tflops"] == pytest.approx(2 * row["n"] ** 3 / row["time_s"] / 1e12)
        best = max(best, row["tflops"])
        assert row["best_tflops"] == best and row["of_measured"] == pytest.approx(row["tflops"] / best)
        assert row["of_datasheet"] == pytest.approx(row["tflops"] / 0.5)
    (row,) = rows_of(benchmarks.elementwise, rates, sizes=[1 << 12])
    assert row["gflops"] == pytest.approx(4096 / row["time_s"] / 1e9)
    assert row["gbps"] == pytest.approx(8 * row["gflops"])
    assert row["of_measured"] == pytest.approx(row["gbps"] / 20)
    assert row["of_datasheet"] == pytest.approx(row["gbps"] / 40)
    (row,) = rows_of(benchmarks.layer, rates, blocks=["opt"], seq=[8], batch=[2], dtype="bf16")
    assert row["best_tflops"] == max(row[key] for key in row if key.endswith("_tflops")) and row["of_measured"] <= 1
    assert row["of_datasheet"] is None


def test_what_would_take_too_long_is_predicted_and_not_begun(monkeypatch, capsys):
    """A product that takes n^3 nanoseconds: 8.6 s at 2048, and less than a second for all that is done."""
    sizes = []

    def slow(left, right, out):
        sizes.append(len(left))
        time.sleep(len(left) ** 3 * 1e-9)

    monkeypatch.setattr(torch, "mm", slow)
    monkeypatch.setitem(benchmarks.PROBE_SIZES, "cpu", (16,))
    words = "zero-inference micro matmul --device cpu --sizes 128 2048 --dtype fp16 --format csv --min-run-time 0.01"
    assert console_main(words.split()) == 0
    good, skipped = csv.DictReader(io.StringIO(capsys.readouterr().out))
    assert float(good["tflops"]) > 0 and max(sizes) == 512
    assert skipped["tflops"] == "" and skipped["skipped"].startswith("one product is expected to take ")
    assert skipped["skipped"].endswith(" s, longer than --longest-call 3")


@pytest.mark.parametrize("name", ["llama", "opt"])
def test_norm_kernels_have_rows_of_their_own(name, monkeypatch, small):
    """No kernel runs here: the trial on the device is taken as good, and operators compute the reference."""
    monkeypatch.setattr(benchmarks, "prepare_norm_kernels", lambda *arguments: None)
    patch = make_norm_patch("cuda", CPU, ["bert", name])
    plain, patched, bert = (build_block(each, CPU, torch.float32) for each in (name, name, "bert"))
    x = torch.randn(2, 7, plain.shape.hidden)
    assert patch(patched) == 2 and patch(bert) == 0
    with torch.no_grad():
        torch.testing.assert_close(patched.parts["layer"](x), plain.parts["layer"](x))
    sizes = dict(blocks=[name, "bert"], seq=[8], batch=[1, 2])
    rows = rows_of(benchmarks.layer, known_rates(fp32=1.0), dtype="fp32", norm_kernels="cuda", **sizes)
    assert [(row["block"], row["norms"], row["batch"], row.get("norm_modules_patched")) for row in rows] == [
        *((name, "torch", batch, None) for batch in (1, 2)),
        *((name, "cuda", batch, 2) for batch in (1, 2)),
        *(("bert", "torch", batch, None) for batch in (1, 2)),
    ]
    for before, after in zip(rows[:2], rows[2:4]):
        assert after["norm_speedup"] == pytest.approx(before["forward_s"] / after["forward_s"])
        assert "norm_speedup" not in before and "dense_tflops" not in after


def test_norm_kernels_that_can_patch_nothing_are_an_error(monkeypatch, small):
    monkeypatch.setattr(benchmarks, "prepare_norm_kernels", lambda *arguments: None)
    with pytest.raises(UsageError, match="--norm-kernels cuda: the family bert is not in the table"):
        make_norm_patch("cuda", CPU, ["bert", "t5"])
    block = build_block("llama", CPU, torch.float32)
    block.module.input_layernorm = torch.nn.RMSNorm(48)
    with pytest.raises(RunError, match="--norm-kernels cuda: llama with a .*RMSNorm is not in the table"):
        make_norm_patch("cuda", CPU, ["llama"])(block)


def test_what_does_not_fit_is_a_row_with_an_error(monkeypatch, capsys):
    def mm(left, right, out):
        if left.shape[0] > 16:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return torch.matmul(left, right)

    monkeypatch.setattr(torch, "mm", mm)
    monkeypatch.setitem(benchmarks.PROBE_SIZES, "cpu", (16,))
    words = "zero-inference micro matmul --device cpu --sizes 16 32 --dtype fp32 --format csv --min-run-time 0.01"
    assert console_main(words.split()) == 1
    shown = capsys.readouterr()
    good, bad = csv.DictReader(io.StringIO(shown.out))
    assert float(good["tflops"]) > 0 and bad["error"] == "out of memory" and bad["tflops"] == ""
    assert "1 of 2 rows were not measured" in shown.err and "dtype fp32  n 16  time_s" in shown.err


def test_json_and_a_plot_of_layer(tmp_path, capsys):
    words = "zero-inference micro layer --device cpu --blocks bert-large llama-3.2-1b --seq 8 16 --batch 1 --min-run-time 0.01"
    assert console_main([*words.split(), "--format", "json", "--plot", str(tmp_path / "layer.png")]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [(row["block"], row["seq"]) for row in report["rows"]] == list(
        itertools.product(("bert-large", "llama-3.2-1b"), (8, 16))
    )
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


@pytest.mark.parametrize("words", ["matmul --sizes 16 33 --format md", "elementwise --sizes 100 3000"])
def test_tables_of_the_command(words, tmp_path, capsys):
    plot = ["--plot", str(tmp_path / "plot.png")]
    options = [*words.split(), "--device", "cpu", "--min-run-time", "0.01", *plot]
    assert console_main(["zero-inference", "micro", *options]) == 0
    out = capsys.readouterr().out
    assert "of measured" in out and "of datasheet" not in out and max(map(len, out.splitlines()[:4])) <= 100
    assert (tmp_path / "plot.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    "words, error",
    [
        ("matmul --device cpu --dtype tf32", "--dtype tf32: this CPU does not support it"),
        ("layer --device cpu --norm-kernels cuda", "there is no CUDA device"),
        ("layer --device cpu --norm-kernels cuda --blocks t5-large", "the family t5 is not in the table"),
        ("layer --device cpu --blocks opt-66c", "--blocks opt-66c: there is no such block"),
        ("layer --device cpu --blocks mixtral-8x7b", "--blocks mixtral-8x7b: there is no such block; take bert-large"),
        ("layer --device cpu --blocks bert-large --seq 1024", "bert-large has 512 positions"),
        ("matmul --plot figure.svg", "plots are PNG files"),
        ("matmul --plot no/such/folder/figure.png", "name another file, in a folder that can be written"),
        ("matmul --sizes 0", "0 is less than 1"),
        ("elementwise --min-run-time -1", "not a time above 0"),
        ("sort", "command sort: choose one of matmul, elementwise, layer"),
    ],
)
def test_bad_usage(words, error, capsys):
    try:
        code = console_main(["zero-inference", "micro", *words.split()])
    except SystemExit as left:
        code = left.code
    shown = capsys.readouterr()
    assert code == 2 and error in shown.err and not shown.out


def test_help_answers_without_torch():
    command = [sys.executable, "-X", "importtime", "-m", "zero_inference", "micro", "layer", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.returncode == 0 and "--norm-kernels" in done.stdout
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert not {"torch", "matplotlib", "pandas"} & imported
