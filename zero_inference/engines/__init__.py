"""Inference engines: one module each, with the functions that `zero_inference.engines.base` describes."""

from __future__ import annotations

from importlib import import_module

_ENGINES = {
    "deepspeed": "zero_inference.engines.deepspeed.engine",
    "stream": "zero_inference.engines.stream.engine",
    "accelerate": "zero_inference.engines.accelerate",
    "resident": "zero_inference.engines.resident",
}


def engine_module(name: str):
    return import_module(_ENGINES[name])
