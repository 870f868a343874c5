"""The CPU backend: a thread pool that multiplies weights in host memory (csrc/cpu), and the hand-off with a CUDA stream."""
