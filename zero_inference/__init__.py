"""Inference of models larger than the GPU, each number beside the limit of the machine."""

__version__ = "0.1.0"
