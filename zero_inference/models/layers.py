"""Finding the decoder layers of any model: found, not listed by family."""

from __future__ import annotations

from torch import nn

from zero_inference.errors import UsageError


def decoder_layers(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """Name and ModuleList of the decoder layers: the longest ModuleList that is not inside another one.

    Raises:
        UsageError: the model has no ModuleList of layers.
    """
    found: list[tuple[str, nn.ModuleList]] = []
    for name, module in model.named_modules():
        inside = any(name.startswith(outer + ".") for outer, _ in found)
        if isinstance(module, nn.ModuleList) and len(module) and not inside:
            found.append((name, module))
    if not found:
        raise UsageError(f"{type(model).__name__} has no list of decoder layers to offload: use --engine resident.")
    return max(found, key=lambda pair: len(pair[1]))
