"""How a model is run: one file an engine, behind the small protocol of `zero_inference.engines.base`."""

from __future__ import annotations

from importlib import import_module

_ENGINES = {
    "deepspeed": "zero_inference.engines.deepspeed.engine",
    "stream": "zero_inference.engines.stream.engine",
    "accelerate": "zero_inference.engines.accelerate",
    "resident": "zero_inference.engines.resident",
}


def engine_module(name: str):
    """The module of engine `name`; it has `check(config, spec, ranks)` and `load(config, spec, ranks) -> LoadedModel`."""
    return import_module(_ENGINES[name])
