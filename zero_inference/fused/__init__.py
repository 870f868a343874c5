"""Fused kernels: each replaces several of PyTorch's in models for which a trial gives the same results."""
