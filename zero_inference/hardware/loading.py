"""How fast weights come to where a run needs them: drawn, quantized, and put into new host memory."""

from __future__ import annotations

from collections.abc import Callable

import torch

from zero_inference.config.options import GROUP_SIZES
from zero_inference.cpu.products import quantize
from zero_inference.hardware.compute import median_s
from zero_inference.hardware.description import Loading
from zero_inference.kernels.groups import GroupQuantization
from zero_inference.models.weights import fill_dummy
from zero_inference.utils.host_memory import host_empty

SIZE = {"cuda": 8192, "cpu": 2048}  # of a square weight
SECONDS = 0.1  # of each measurement


def measure_loading(device: torch.device) -> Loading:
    """About a second. Raises RunError where no host memory may be page-locked."""
    on_gpu = device.type == "cuda"
    size = SIZE[device.type]
    weight = torch.empty(size, size, dtype=torch.bfloat16, device=device)
    raw = weight.view(-1).view(torch.uint8)
    kept: list[torch.Tensor] = []  # new memory each time

    def keep() -> None:
        kept.append(host_empty(raw.shape, torch.uint8, pinned=on_gpu))
        kept[-1].copy_(raw)

    def quantized(bits: int) -> Callable[[], object]:
        return lambda: quantize(weight, GroupQuantization(bits, GROUP_SIZES[bits]))

    def rate(action: Callable[[], object]) -> float:
        return weight.nbytes / median_s(device, action, SECONDS) / 1e9

    return Loading(
        draw_gb_per_s=rate(lambda: fill_dummy(weight, "weight", 0)),
        quantize_int8_gb_per_s=rate(quantized(8)),
        quantize_int4_gb_per_s=rate(quantized(4)),
        keep_gb_per_s=rate(keep),
    )
