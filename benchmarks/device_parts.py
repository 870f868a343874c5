"""What the parts of a decode step take a device: products by format, size and tokens, small kernels, attention with a mask.

    python benchmarks/device_parts.py [--shapes 5120x5120 ...] [--tokens 1 8 32] [--heads 40 ...] [--positions 160 ...]

Medians, on a GPU of CUDA graphs, with other memory each time. A weight's GB/s are those of its stored bytes; the line that a plan takes
for a format is that through the two sizes of `zero_inference.link.compute`.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common.shapes import shape_of  # noqa: E402

SHAPES = ((2048, 2048), (5120, 5120), (15360, 5120), (5120, 13824), (28672, 7168), (8192, 28672))
BATCHES, HEAD_DIM = (1, 8, 32), 128
MOST_BYTES = 1 << 30  # of keys and values that attention goes through in turn
SECONDS = 0.05


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shapes", type=shape_of, nargs="+", default=SHAPES, metavar="ROWSxCOLUMNS", help="of weights")
    parser.add_argument("--tokens", type=int, nargs="+", default=(1, 8, 32))
    parser.add_argument("--heads", type=int, nargs="+", default=(40, 64))
    parser.add_argument("--positions", type=int, nargs="+", default=(160, 640))
    asked = parser.parse_args()
    import torch

    from zero_inference.link.compute import DeviceWeights, product_times
    from zero_inference.link.core_rates import FORMATS
    from zero_inference.link.in_graph import InGraph

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    print(f"{torch.cuda.get_device_name() if device.type == 'cuda' else 'CPU'}, torch {torch.__version__}")
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
    graph = InGraph.measured(device)
    attention = "unknown" if graph.attention_gb_per_s is None else f"{graph.attention_gb_per_s:.0f} GB/s"
    print(f"an operator of a layer without products: {1e6 * graph.operator_s:.2f} us, attention {attention}")
    for batch, heads, positions in itertools.product(BATCHES, asked.heads, asked.positions):
        spent_s, nbytes = attention_s(device, batch, heads, positions)
        rate = nbytes / spent_s / 1e9
        print(f"attention {batch} x {heads} heads, {positions} positions: {1e6 * spent_s:.1f} us, {rate:.0f} GB/s")


def attention_s(device, batch: int, heads: int, positions: int) -> tuple[float, int]:
    """Seconds of one token's attention of `batch` sequences, and the bytes of keys and values that it reads."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    from zero_inference.link.compute import as_graph, median_s

    size = batch, heads, positions, HEAD_DIM
    nbytes = 2 * 2 * batch * heads * positions * HEAD_DIM
    kept = [
        torch.randn(2, *size, device=device, dtype=torch.bfloat16) for _ in range(min(40, 1 + MOST_BYTES // nbytes))
    ]
    query = torch.randn(batch, heads, 1, HEAD_DIM, device=device, dtype=torch.bfloat16)
    mask = torch.zeros(batch, 1, 1, positions, device=device, dtype=torch.bfloat16)

    def attend() -> None:
        for keys, values in kept:
            scaled_dot_product_attention(query, keys, values, attn_mask=mask)

    action = as_graph(device, attend) if device.type == "cuda" else attend
    return median_s(device, action, SECONDS) / len(kept), nbytes


if __name__ == "__main__":
    main()
