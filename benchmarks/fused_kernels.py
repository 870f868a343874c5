"""Time and check the kernels that fuse several of PyTorch's in a decode step: rotary embedding and routing.

    python benchmarks/fused_kernels.py [--tokens 1 8 512 4096]

Microseconds are those of a call, median of replays of a CUDA graph of many. Rotary embedding must have PyTorch's bits, weights of
routing may differ by 1%.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

# heads, key heads, head_dim
ROTATED = {"Qwen3-30B": (32, 4, 128), "Llama-3.1-70B": (64, 8, 128), "gpt-oss-120b": (64, 8, 64)}
# experts, k, softmax first
ROUTED = {"Mixtral": (8, 2, True), "Qwen3-30B": (128, 8, True), "gpt-oss-120b": (128, 4, False)}
REPEATS = 50  # of a graph
SECONDS = 0.2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=(1, 8, 512, 4096))
    tokens = parser.parse_args().tokens
    import torch
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    from zero_inference.kernels.extension import load_extension, why_unavailable
    from zero_inference.kernels.rotary import Form, rotate
    from zero_inference.models.mlp import choose_experts_reference

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    print(f"{torch.cuda.get_device_name() if device.type == 'cuda' else 'CPU'}, torch {torch.__version__}")
    if device.type == "cuda" and not load_extension():
        sys.exit(f"no kernels: {why_unavailable()}")

    def print_times(what: str, ways: dict, exact: bool) -> None:
        results = [way() for way in ways.values()]
        same = all(torch.equal(*pair) if exact else torch.allclose(*pair, rtol=0.01) for pair in zip(*results))
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
        print_times(f"rotary embedding, {model}, {count} tokens", ways, exact=True)
    for (model, (experts, k, softmax_first)), count in itertools.product(ROUTED.items(), tokens):
        args = torch.randn(count, experts, device=device).bfloat16(), k, softmax_first, softmax_first, False
        ways = {
            "kernel": lambda args=args: torch.ops.zero_inference.choose_experts(*args)[:1],
            "PyTorch": lambda args=args: choose_experts_reference(*args)[:1],
        }
        print_times(f"routing, {model}, {count} tokens", ways, exact=False)


def _call_s(device, way) -> float:
    from zero_inference.utils.timing import capture_graph, measure_median_s

    def many() -> None:
        for _ in range(REPEATS):
            way()

    return measure_median_s(device, capture_graph(device, many) if device.type == "cuda" else many, SECONDS) / REPEATS


if __name__ == "__main__":
    main()
