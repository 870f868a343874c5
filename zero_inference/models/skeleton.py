"""A model without weights: every parameter on the meta device, every buffer real."""

from __future__ import annotations

import torch

from zero_inference.errors import UsageError
from zero_inference.models.spec import ModelSpec


def empty_model(spec: ModelSpec):
    """Build the model of `spec` with parameters on the meta device, in `spec.dtype`, tied weights tied.

    Buffers (rotary frequencies, position ids, masks) are computed for real, because no checkpoint holds them.
    """
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM, GenerationConfig

    try:
        with init_empty_weights(include_buffers=False):
            model = AutoModelForCausalLM.from_config(spec.config, dtype=spec.dtype, trust_remote_code=spec.trust_remote_code)
    except (ValueError, KeyError, ImportError) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UsageError(f"--model {spec.name}: transformers cannot build it as a causal language model ({first[:200]}).") from error
    model.tie_weights()
    model.generation_config = GenerationConfig()  # no sampling, forced tokens or stop words of the checkpoint's own
    model.requires_grad_(False)
    return model.eval()


def unique_parameter_names(model: torch.nn.Module) -> dict[int, list[str]]:
    """All names of each parameter, by its id: more than one name means tied."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return names
