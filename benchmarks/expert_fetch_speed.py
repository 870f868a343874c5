"""How fast a kernel copies experts from page-locked host memory, by the size of its launch, beside the copy engine.

    python benchmarks/expert_fetch_speed.py

An expert of Qwen3-30B-A3B has 2.65 MB in 4 bits. Needs a CUDA device and nvcc. The kernel is that of csrc/crossing/expert_fetch.cu with
its launch as arguments.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.utils.cpp_extension import load_inline

EXPERT_BYTES, EXPERTS, REPETITIONS = 2654208, 512, 60
LAUNCHES = ((4, 256), (8, 256), (16, 256), (16, 512), (32, 512), (64, 512), (132, 512))  # blocks of an expert, threads
KERNEL = """
#include <c10/cuda/CUDAStream.h>
#include <torch/extension.h>
__global__ void fetch(const uint4* source, uint4* target, const int64_t* experts, int64_t vectors) {
  source += experts[blockIdx.y] * vectors;
  target += blockIdx.y * vectors;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t first = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; first < vectors; first += 4 * stride) {
    uint4 values[4];
    for (int i = 0; i < 4; ++i) if (first + i * stride < vectors) values[i] = __ldcs(source + first + i * stride);
    for (int i = 0; i < 4; ++i) if (first + i * stride < vectors) target[first + i * stride] = values[i];
  }
}
void run(torch::Tensor source, torch::Tensor target, torch::Tensor experts, int64_t vectors, int64_t blocks, int64_t threads) {
  fetch<<<dim3(blocks, experts.numel()), threads, 0, c10::cuda::getCurrentCUDAStream()>>>(
      static_cast<const uint4*>(source.data_ptr()), static_cast<uint4*>(target.data_ptr()), experts.data_ptr<int64_t>(), vectors);
}
"""


def main() -> None:
    declaration = "void run(torch::Tensor, torch::Tensor, torch::Tensor, int64_t, int64_t, int64_t);"
    module = load_inline("expert_fetch_speed", declaration, KERNEL, functions=["run"], extra_cuda_cflags=["-O3"])
    host = torch.zeros(EXPERTS * EXPERT_BYTES, dtype=torch.uint8, pin_memory=True)
    device = torch.zeros(8 * EXPERT_BYTES, dtype=torch.uint8, device="cuda")
    seconds = seconds_of(lambda turn: device[:EXPERT_BYTES].copy_(host[:EXPERT_BYTES], non_blocking=True))
    print(f"copy engine, one expert: {EXPERT_BYTES / seconds / 1e9:.1f} GB/s")
    for count in (1, 2, 3, 4, 8):
        chosen = [torch.randint(0, EXPERTS, (count,), device="cuda") for _ in range(REPETITIONS + 5)]
        for blocks, threads in LAUNCHES:

            def fetch(turn: int, chosen=chosen, blocks=blocks, threads=threads) -> None:
                module.run(host, device, chosen[turn], EXPERT_BYTES // 16, blocks, threads)

            seconds = seconds_of(fetch)
            rate = count * EXPERT_BYTES / seconds / 1e9
            print(f"{count} experts, {blocks} blocks of {threads}: {rate:.1f} GB/s, {1e6 * seconds:.0f} us", flush=True)


def seconds_of(call: Callable[[int], object]) -> float:
    """Return the mean time of a call on the device."""
    for turn in range(5):
        call(turn)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for turn in range(5, REPETITIONS + 5):
        call(turn)
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / REPETITIONS / 1e3


if __name__ == "__main__":
    main()
