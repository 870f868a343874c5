"""Check that the dequantize kernel on a CUDA device has the bits of the PyTorch reference, and time it.

    python benchmarks/dequantize_speed.py [--out FILE]        (exit code 1 on a mismatch, 2 without device or kernel)

GB/s are 10^9 bytes a second, read (codes, scales, minima) and written (weights): medians of single launches timed by events, compared
with a device-to-device copy of the same weights. The output and its codes are larger than the L2 cache of these devices.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

SHAPE = (5120, 20480)  # the second MLP matrix of OPT-13B
SECONDS = 0.05
CHECKED_GROUP_SIZES = (32, 64, 128, 2, 6, 24, 96)  # the last four: too small for a vector, or no power of two
CHECKED_GROUPS = (0, 1, 3, 33, 4099)
OFFSETS = (0, 1)  # elements by which tensors are moved off their alignment


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the measurements as JSON")
    args = parser.parse_args()
    import torch

    from zero_inference.kernels.extension import load_extension, why_unavailable

    if not load_extension():
        print(f"no dequantize kernel: {why_unavailable()}", file=sys.stderr)
        return 2
    checked, wrong = check()
    for case in wrong:
        print(f"MISMATCH {case}", file=sys.stderr)
    print(f"{checked - len(wrong)} of {checked} cases bit-equal with the reference")
    if wrong:
        return 1
    record = dict(device=torch.cuda.get_device_name(), torch=torch.__version__, shape=SHAPE, checked=checked)
    record["cases"] = measure()
    print(f"{record['device']}, weights {SHAPE[0]} x {SHAPE[1]}\n")
    print("| dtype | bits | group | median ms | GB/s | of a copy's | PyTorch ms |")
    print("|---|---|---|---|---|---|---|")
    for case in record["cases"]:
        print(
            f"| {case['dtype']} | {case['bits']} | {case['group_size']} | {case['median_ms']:.4f} | {case['gb_per_s']:.0f} "
            f"| {case['gb_per_s'] / case['copy_gb_per_s']:.1%} | {case['reference_ms']:.3f} |"
        )
    if args.out:
        args.out.write_text(json.dumps(record, indent=1) + "\n")
    return 0


def check() -> tuple[int, list[str]]:
    """Return the number of cases and those that differ, over dtypes, bits, group sizes, odd numbers of groups, and unaligned tensors."""
    import torch

    from zero_inference.kernels.formats import dequantize_reference
    from zero_inference.kernels.quantization import GroupQuantization, dequantize

    generator = torch.Generator("cuda").manual_seed(5)
    checked, wrong = 0, []
    odd_sizes = [(8, 5), (8, 7)]  # bits, group size
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        for bits, group_size in [(bits, size) for bits in (8, 4) for size in CHECKED_GROUP_SIZES] + odd_sizes:
            for groups in CHECKED_GROUPS:
                for offset in OFFSETS:
                    numel = groups * group_size
                    codes = torch.randint(
                        0, 256, (numel * bits // 8 + offset,), dtype=torch.uint8, device="cuda", generator=generator
                    )[offset:]
                    scale = (torch.rand(groups, device="cuda", generator=generator) * 0.01).to(dtype)
                    minimum = torch.randn(groups, device="cuda", generator=generator).to(dtype)
                    memory = torch.full((numel + offset + 8,), 7.0, dtype=dtype, device="cuda")
                    expected = torch.empty(numel, dtype=dtype, device="cuda")
                    weight = GroupQuantization(bits, group_size).as_weight(codes, scale, minimum)
                    dequantize(weight, memory[offset : offset + numel])
                    if numel:
                        dequantize_reference(weight, expected)
                    around = torch.cat([memory[:offset], memory[offset + numel :]])
                    checked += 1
                    if not torch.equal(memory[offset : offset + numel], expected) or not bool((around == 7).all()):
                        wrong.append(f"{dtype} {bits} bits, group size {group_size}, {groups} groups, offset {offset}")
    return checked, wrong


def measure() -> list[dict]:
    """Return a record of each case: median_ms and gb_per_s of the kernel, copy_gb_per_s of copying the weights, PyTorch's reference_ms."""
    import torch

    from zero_inference.kernels.formats import dequantize_reference
    from zero_inference.kernels.quantization import GroupQuantization, dequantize, quantize
    from zero_inference.utils.timing import measure_median_s

    def median_ms(work, *args) -> float:
        return 1e3 * measure_median_s(torch.device("cuda"), lambda: work(*args), SECONDS)

    cases = []
    for dtype in (torch.float16, torch.bfloat16):
        weight = torch.randn(SHAPE, device="cuda", generator=torch.Generator("cuda").manual_seed(6)).to(dtype)
        out = torch.empty_like(weight)
        copy_ms = median_ms(out.copy_, weight)
        for bits in (4, 8):
            for group_size in (32, 64, 128):
                scheme = GroupQuantization(bits, group_size)
                packed = scheme.as_weight(*quantize(weight, scheme))
                moved = scheme.stored_bytes(weight.numel(), dtype) + out.nbytes
                median = median_ms(dequantize, packed, out)
                reference = median_ms(dequantize_reference, packed, out)
                case = dict(dtype=str(dtype).removeprefix("torch."), bits=bits, group_size=group_size)
                case |= dict(median_ms=median, gb_per_s=moved / median / 1e6)
                cases.append(case | dict(copy_gb_per_s=2 * out.nbytes / copy_ms / 1e6, reference_ms=reference))
    return cases


if __name__ == "__main__":
    sys.exit(main())
