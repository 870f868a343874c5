"""How long the device attends over keys and values in its own memory, for a token of each sequence: kernels of a decode step's graph.

They are those of runs, without cuDNN's, which go through 2048 positions of 512 heads at 4.1 TB/s on an H200 and are not repeatable
(h200-kept/eleventh_host: machine.json).
"""

from __future__ import annotations

import itertools

import torch

from zero_inference.hardware.compute import CLOCKS_S, as_graph, median_s
from zero_inference.hardware.description import DeviceAttention
from zero_inference.kernels.decode_attention import attend
from zero_inference.models.prompts import disable_cudnn_attention

HEAD_DIM, DTYPE = 128, torch.bfloat16
# Query heads that share a key head; key heads of all sequences; positions. Others lie between them, and time grows by lines beyond: few
# heads keep little of a GPU busy, and few positions are less than what a kernel takes to begin.
HEADS, KEY_HEADS, POSITIONS = (1, 8), (32, 512), (160, 2048)
CACHES_BYTES, MOST_LAYERS = 256 << 20, 64  # what layers take together, where as many are not more
SECONDS = 0.05


def measure_device_attention(device: torch.device) -> tuple[DeviceAttention, ...]:
    """Without those whose keys and values do not fit in the device's memory."""
    found = []
    attention_s(device, HEADS[0], KEY_HEADS[0], POSITIONS[0], seconds=CLOCKS_S)
    for heads, key_heads, positions in itertools.product(HEADS, KEY_HEADS, POSITIONS):
        try:
            seconds = attention_s(device, heads, key_heads, positions)
        except torch.OutOfMemoryError:
            continue
        found.append(DeviceAttention(heads=heads, key_heads=key_heads, positions=positions, seconds=seconds))
    return tuple(found)


def attention_s(
    device: torch.device,
    heads: int,
    key_heads: int,
    positions: int,
    key_heads_per_sequence: int = 8,
    layers: int | None = None,
    seconds: float = SECONDS,
) -> float:
    """Median seconds of a layer's attention.

    Args:
        heads: query heads that share a key head.
        key_heads: of all sequences.
        positions: of keys and values.
        layers: that a graph has; None for as many as caches do not hold.
        seconds: to measure for.
    """
    disable_cudnn_attention()
    shape = key_heads // key_heads_per_sequence, key_heads_per_sequence, positions, HEAD_DIM
    layer_bytes = 2 * torch.Size(shape).numel() * DTYPE.itemsize
    count = layers or min(MOST_LAYERS, 1 + CACHES_BYTES // layer_bytes)
    kept = [torch.randn(2, *shape, device=device, dtype=DTYPE) for _ in range(count)]
    query = torch.randn(shape[0], heads * key_heads_per_sequence, 1, HEAD_DIM, device=device, dtype=DTYPE)
    mask = torch.zeros(shape[0], 1, 1, positions, device=device, dtype=DTYPE)

    def step() -> None:
        for keys, values in kept:
            attend(_plain, torch.nn.Identity(), query, keys, values, mask)

    action = as_graph(device, step) if device.type == "cuda" else step
    return median_s(device, action, seconds) / count


def _plain(module, query, key, value, mask, **_) -> tuple[torch.Tensor, None]:
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask), None
