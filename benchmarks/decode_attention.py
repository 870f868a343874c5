"""Time attention of decode steps on a CUDA device: our kernel, and PyTorch's as models call them.

    python benchmarks/decode_attention.py [--dtype float16]    (exit code 2 without device or kernel)

Microseconds are those of one layer, median of replays of a CUDA graph of more layers than caches hold. TB/s are 10^12 bytes a second of
the keys and values that are seen. PyTorch's memory-efficient attention takes the mask, with heads that share keys as rows of one
product, and its result is copied to [batch, 1, heads, head_dim]. Its flash attention takes no mask and is timed over the seen positions
alone, which a graph of a growing cache cannot do. `error` is the relative norm of the difference to float64.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

# model, sequences, query heads, key heads, head_dim, positions that are seen, positions of the cache
CASES = (
    ("Qwen3-30B-A3B", 1, 32, 4, 128, 576, 576),
    ("Qwen3-30B-A3B", 1, 32, 4, 128, 576, 4096),
    ("Qwen3-30B-A3B", 1, 32, 4, 128, 4096, 4096),
    ("Llama-2-13B", 1, 40, 40, 128, 576, 576),
    ("Llama-2-13B", 1, 40, 40, 128, 4096, 4096),
    ("Llama-2-13B", 8, 40, 40, 128, 2048, 2048),
    ("Llama-2-13B", 64, 40, 40, 128, 512, 512),
    ("Llama-3.1-8B", 1, 32, 8, 128, 576, 576),
    ("Llama-3.1-8B", 8, 32, 8, 128, 2048, 2048),
    ("Llama-3.1-8B", 64, 32, 8, 128, 512, 512),
    ("Llama-3.1-405B", 1, 128, 8, 128, 576, 576),
    ("gemma-2-9b's width", 1, 16, 8, 256, 576, 576),
)
CACHES_BYTES = 256 << 20  # more than the L2 caches of these devices
MAX_LAYERS, SECONDS = 64, 0.2


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    dtype_name = parser.parse_args().dtype
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    from zero_inference.kernels import decode_attention  # noqa: F401  its schema
    from zero_inference.kernels.extension import load_extension, why_unavailable
    from zero_inference.utils.timing import capture_graph, measure_median_s

    if not load_extension():
        print(f"no kernel: {why_unavailable()}", file=sys.stderr)
        return 2
    dtype, device = getattr(torch, dtype_name), torch.device("cuda")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {dtype_name}; us (TB/s, error)")
    names = ("kernel", "memory-efficient", "flash, no mask")
    print(f"{'':18} {'batch':>5} {'heads':>6} {'positions':>11}" + "".join(f" {name:>25}" for name in names))
    for model, batch, heads, key_heads, width, seen, positions in CASES:
        layer_bytes = 2 * batch * key_heads * positions * width * dtype.itemsize
        layers = min(MAX_LAYERS, 1 + CACHES_BYTES // layer_bytes)
        caches = [torch.randn(2, batch, key_heads, positions, width, device=device, dtype=dtype) for _ in range(layers)]
        query = torch.randn(batch, heads, 1, width, device=device, dtype=dtype)
        mask = torch.zeros(batch, 1, 1, positions, device=device, dtype=dtype)
        mask[..., seen:] = torch.finfo(dtype).min

        def kernel(keys, values, query=query, mask=mask, width=width):
            return torch.ops.zero_inference.decode_attention(query, keys, values, mask, width**-0.5)

        def efficient(keys, values, query=query, mask=mask):
            rows = query.view(keys.shape[0], keys.shape[1], -1, keys.shape[3])
            with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
                out = scaled_dot_product_attention(rows, keys, values, attn_mask=mask)
            return out.reshape(query.shape).transpose(1, 2).contiguous()

        def flash(keys, values, query=query, seen=seen):
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                out = scaled_dot_product_attention(query, keys[:, :, :seen], values[:, :, :seen], enable_gqa=True)
            return out.transpose(1, 2)

        groups = heads // key_heads
        key, value = (each[:1, :, :seen].double().repeat_interleave(groups, 1) for each in caches[0])
        scores = query[:1].double() @ key.transpose(2, 3) * width**-0.5
        exact = (scores.softmax(3) @ value).transpose(1, 2)
        line = f"{model:18} {batch:5} {f'{heads}/{key_heads}':>6} {f'{seen}/{positions}':>11}"
        for action in (kernel, efficient, flash):
            try:
                error = (action(*caches[0])[:1].double() - exact).norm() / exact.norm()
                step = capture_graph(device, lambda action=action, caches=caches: [action(*each) for each in caches])
                seconds = measure_median_s(device, step, SECONDS) / layers
                rate = layer_bytes * seen / positions / seconds / 1e12
                cell = f"{1e6 * seconds:.1f} ({rate:.2f}, {float(error):.0e})"
            except RuntimeError as refused:  # a backend that does not take these
                cell = (str(refused).splitlines() or ["refused"])[0][:24]
            line += f" {cell:>25}"
        print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
