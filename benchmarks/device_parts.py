"""What the parts of a decode step take a device: products by format, size and tokens, small kernels, attention with a mask.

    python benchmarks/device_parts.py [--shapes 5120x5120 ...] [--tokens 1 8 32] [--heads 1 8] [--positions 160 ...]
    python benchmarks/device_parts.py --fused [--tokens 1 8 512 4096]

Medians, on a GPU of CUDA graphs, with other memory each time. A weight's GB/s are those of its stored bytes; the line that a plan takes
for a format is that through the two sizes of `zero_inference.hardware.bench_device`. `--fused` times nothing but our kernels of rotary
embedding and of routers, beside what PyTorch has for them.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common.shapes import shape_of  # noqa: E402

SHAPES = ((2048, 2048), (5120, 5120), (15360, 5120), (5120, 13824), (28672, 7168), (8192, 28672))


ROTATED = {
    "Qwen3-30B": (32, 4, 128),
    "Llama-3.1-70B": (64, 8, 128),
    "gpt-oss-120b": (64, 8, 64),
}  # heads, key heads, head_dim
ROUTED = {
    "Mixtral": (8, 2, True),
    "Qwen3-30B": (128, 8, True),
    "gpt-oss-120b": (128, 4, False),
}  # experts, k, softmax first
REPEATS = 50  # of a graph
SECONDS = 0.2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shapes", type=shape_of, nargs="+", default=SHAPES, metavar="ROWSxCOLUMNS", help="of weights")
    parser.add_argument("--tokens", type=int, nargs="+", default=(1, 8, 32))
    parser.add_argument("--heads", type=int, nargs="+", default=(1, 8), help="that share a key head")
    parser.add_argument(
        "--key-heads", type=int, nargs="+", default=(8, 32, 320, 1280), help="of all sequences, in eights"
    )
    parser.add_argument("--positions", type=int, nargs="+", default=(160, 640, 4096))
    parser.add_argument("--fused", action="store_true", help="only kernels that stand for several of PyTorch's")
    asked = parser.parse_args()
    if any(count % 8 for count in asked.key_heads):
        parser.error("--key-heads: a sequence has eight of them, so it takes multiples of 8")
    import torch

    from zero_inference.hardware.bench_cpu import FORMATS
    from zero_inference.hardware.bench_device import DeviceWeights, attention_s, product_times
    from zero_inference.hardware.bench_launch import measure_graph_operator
    from zero_inference.hardware.rates import ATTENTION_HEAD_DIM

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    print(f"{torch.cuda.get_device_name() if device.type == 'cuda' else 'CPU'}, torch {torch.__version__}")
    if asked.fused:
        return _fused(device, asked.tokens)
    for name in ("bfloat16", "int8", "int4"):
        dtype, scheme = FORMATS[name]
        for tokens, found in product_times(device, dtype, scheme, asked.tokens).items():
            print(f"{name}, {tokens} tokens: {found.gb_per_s:.0f} GB/s, and {1e6 * found.call_s:.1f} us besides")
        for shape in asked.shapes:
            weights = DeviceWeights(device, dtype, scheme, shape)
            for tokens in asked.tokens:
                spent_s = weights.product_s(tokens)
                rate = weights.nbytes / spent_s / 1e9
                print(f"{name} {shape[0]}x{shape[1]}, {tokens} tokens: {1e6 * spent_s:.2f} us, {rate:.0f} GB/s")
            del weights
    print(f"an operator of a layer without products: {1e6 * measure_graph_operator(device):.2f} us")
    for heads, key_heads, positions in itertools.product(asked.heads, asked.key_heads, asked.positions):
        spent_s = attention_s(device, heads, key_heads, positions)
        rate = 2 * 2 * key_heads * positions * ATTENTION_HEAD_DIM / spent_s / 1e9
        print(
            f"attention of {heads} x {key_heads} heads, {positions} positions: {1e6 * spent_s:.1f} us, {rate:.0f} GB/s of keys and values"
        )


def _fused(device, tokens: list[int]) -> None:
    """Print microseconds of one call of many in a graph; bits that differ are a fault of rotary embedding, not of routing."""
    import torch
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    from zero_inference.kernels.extension import load_extension, why_unavailable
    from zero_inference.kernels.rotary import Form, rotate
    from zero_inference.models.experts import choose_experts_reference

    if device.type == "cuda" and not load_extension():
        sys.exit(f"no kernels: {why_unavailable()}")

    def line(what: str, ways: dict, close: bool) -> None:
        made = [way() for way in ways.values()]
        same = all(torch.allclose(*pair, rtol=0.01) if close else torch.equal(*pair) for pair in zip(*made))
        us = ", ".join(f"{name} {1e6 * _call_s(device, way):.2f}" for name, way in ways.items())
        print(f"{what}: us: {us}" + ("" if same else "; RESULTS DIFFER"))

    for (model, (heads, key_heads, head_dim)), count in itertools.product(ROTATED.items(), tokens):
        q, k = (
            torch.randn(1, count, number, head_dim, device=device).bfloat16().transpose(1, 2)
            for number in (heads, key_heads)
        )
        cos, sin = (torch.randn(1, count, head_dim, device=device).bfloat16() for _ in range(2))
        ways = {
            "kernel": lambda args=(q, k, cos, sin): rotate(*args, Form(1, False)),
            "transformers": lambda args=(q, k, cos, sin): apply_rotary_pos_emb(*args),
        }
        line(f"rotary embedding, {model}, {count} tokens", ways, close=False)
    for (model, (experts, k, softmax_first)), count in itertools.product(ROUTED.items(), tokens):
        args = torch.randn(count, experts, device=device).bfloat16(), k, softmax_first, softmax_first, False
        ways = {
            "kernel": lambda args=args: torch.ops.zero_inference.choose_experts(*args)[:1],
            "PyTorch": lambda args=args: choose_experts_reference(*args)[:1],
        }
        line(f"routing, {model}, {count} tokens", ways, close=True)


def _call_s(device, way) -> float:
    from zero_inference.utils.timing import capture_graph, measure_median_s

    def many() -> None:
        for _ in range(REPEATS):
            way()

    return measure_median_s(device, capture_graph(device, many) if device.type == "cuda" else many, SECONDS) / REPEATS


if __name__ == "__main__":
    main()
