"""How fast one CPU core quantizes: bytes of bfloat16 weights per second of CPU time, best of some.

PYTHONPATH=. python benchmarks/quantize_rates.py        (CPU time, so that other programs on the machine count little)
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from deepspeed.inference.quantization.utils import Quantizer

from benchmarks.int4_quality import extremes_and_one_fit
from zero_inference.cpu.library import INSTRUCTIONS, best_instructions
from zero_inference.cpu.products import quantize
from zero_inference.kernels import quantization
from zero_inference.kernels.quantization import GroupQuantization

SIZE, TIMES = 1024, 5


def main() -> None:
    torch.set_num_threads(1)
    weight = (torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(0)) * 0.02).bfloat16()

    def rate(action: Callable[[], object]) -> str:
        taken = []
        for _ in range(TIMES):
            start = time.process_time()
            action()
            taken.append(time.process_time() - start)
        return f"{weight.nbytes / min(taken) / 1e9:.3f}"

    sets = INSTRUCTIONS[: min(3, INSTRUCTIONS.index(best_instructions()) + 1)]
    print("| bits | group | form |", " | ".join(sets), "| PyTorch | before (PyTorch, not packed) or DeepSpeed's own |")
    print("|---|---|---|" + "---|" * (len(sets) + 2))
    for bits, size in ((8, 64), (4, 64), (4, 32)):
        scheme = GroupQuantization(bits, size)
        settings = {"num_bits": bits, "group_size": size, "group_dim": 1, "symmetric": False}
        for divides, form in ((False, "ours"), (True, "DeepSpeed's")):
            rates = [rate(lambda name=name: quantize(weight, scheme, divides, name)) for name in sets]
            rates.append(rate(lambda: quantization.quantize(weight, scheme, divides)))
            if divides:
                rates.append(rate(lambda: Quantizer(settings).quantize(weight)))
            else:
                rates.append(rate(lambda: extremes_and_one_fit(weight, size)) if bits == 4 else "")
            print(f"| {bits} | {size} | {form} |", " | ".join(rates), "|")


if __name__ == "__main__":
    main()
