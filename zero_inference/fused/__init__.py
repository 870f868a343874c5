"""Kernels that stand for several of PyTorch's, in models for which a trial gives the same."""
