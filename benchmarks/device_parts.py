"""What the parts of a decode step take a device: products by format, size and tokens, small kernels, attention with a mask.

    python benchmarks/device_parts.py [--shapes 5120x5120 ...] [--tokens 1 8 32] [--heads 1 8] [--positions 160 ...]

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shapes", type=shape_of, nargs="+", default=SHAPES, metavar="ROWSxCOLUMNS", help="of weights")
    parser.add_argument("--tokens", type=int, nargs="+", default=(1, 8, 32))
    parser.add_argument("--heads", type=int, nargs="+", default=(1, 8), help="that share a key head")
    parser.add_argument(
        "--key-heads", type=int, nargs="+", default=(8, 32, 320, 1280), help="of all sequences, in eights"
    )
    parser.add_argument("--positions", type=int, nargs="+", default=(160, 640, 4096))
    asked = parser.parse_args()
    if any(count % 8 for count in asked.key_heads):
        parser.error("--key-heads: a sequence has eight of them, so it takes multiples of 8")
    import torch

    from zero_inference.link.compute import DeviceWeights, product_times
    from zero_inference.link.core_rates import FORMATS
    from zero_inference.link.device_attention import HEAD_DIM, attention_s
    from zero_inference.link.in_graph import measure_graph_operator

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
    print(f"an operator of a layer without products: {1e6 * measure_graph_operator(device):.2f} us")
    for heads, key_heads, positions in itertools.product(asked.heads, asked.key_heads, asked.positions):
        spent_s = attention_s(device, heads, key_heads, positions)
        rate = 2 * 2 * key_heads * positions * HEAD_DIM / spent_s / 1e9
        print(
            f"attention of {heads} x {key_heads} heads, {positions} positions: {1e6 * spent_s:.1f} us, {rate:.0f} GB/s of keys and values"
        )


if __name__ == "__main__":
    main()
