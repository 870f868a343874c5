"""What the device takes for the small kernels of a decode step that is a CUDA graph: found in decoder layers without their products."""

from __future__ import annotations

import contextlib

import torch

from zero_inference.hardware.compute import as_graph, median_s
from zero_inference.hardware.device_attention import HEAD_DIM, attention_s
from zero_inference.hardware.small_models import POSITIONS, small_llama
from zero_inference.kernels.decode_attention import using_decode_attention
from zero_inference.kernels.extension import load_extension
from zero_inference.kernels.rotary import rotary_kernel
from zero_inference.kv_cache.device import DeviceKVCache
from zero_inference.models.operators import trace_without_weights
from zero_inference.models.prompts import disable_cudnn_attention
from zero_inference.norms.patch import patch_norms

LAYERS = 1, 16  # of two models: what they differ by are operators
WIDTH = 4096  # whose kernels take as long as those of models
SECONDS = 0.05


class _WithoutProduct(torch.nn.Module):
    """A linear module that returns the same memory each time, for one token."""

    def __init__(self, like: torch.nn.Linear):
        super().__init__()
        self.register_buffer("out", torch.zeros(1, 1, like.out_features, device=like.weight.device))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[1, 1, columns] -> [1, 1, rows]."""
        return self.out


def measure_graph_operator(device: torch.device, width: int = WIDTH) -> float:
    """Seconds of the device for an operator of a decoder layer without its products, in a CUDA graph, where operators wait for each other;
    attention is measured by itself.

    A Llama's layer with 40 heads took 43 us on an H200 besides its products; a chain of sums of 4096 elements, which had been measured
    instead, 0.96 us an operator (h200-kept/seventh_host: resident.txt, machine.json). What a kernel of ours computes, norms and rotary
    embedding, counts as many operators as in transformers' own code.
    """
    few, many = (_StepWithoutProducts(layers, device, width) for layers in LAYERS)
    few_s, many_s = (median_s(device, each.step, SECONDS) for each in (few, many))
    more_layers = LAYERS[1] - LAYERS[0]
    layer_s = max(0.0, many_s - few_s) / more_layers
    operators = (many.operators - few.operators) / more_layers
    heads = width // HEAD_DIM
    attending_s = attention_s(device, 1, heads, POSITIONS, key_heads_per_sequence=heads, layers=LAYERS[1])
    return max(0.0, layer_s - attending_s) / (operators - 1)


class _StepWithoutProducts:
    """
    Attributes:
        operators: of a step.
        step: repeats it; on CUDA as a graph.
    """

    def __init__(self, layers: int, device: torch.device, width: int):
        disable_cudnn_attention()
        with torch.device("meta"):
            model = small_llama(layers, width, width // HEAD_DIM).eval()
        _without_products(model)
        counted = trace_without_weights(model, 1, POSITIONS - 1)
        assert counted is not None, "a Llama runs on the meta device"
        self.operators = counted.launches
        rotary = type(model.model.rotary_emb)(model.config).to(device)
        model = model.to_empty(device=device).to(torch.bfloat16)
        model.model.rotary_emb = rotary
        for parameter in model.parameters():
            parameter.fill_(1.0)
        if load_extension():
            patch_norms(model)
        self.model, self.cache = model, DeviceKVCache(model.config, POSITIONS)
        self.ids = torch.zeros(1, 1, dtype=torch.int64, device=device)
        self.place = self.ids.new_zeros(1)
        self.mask = torch.zeros(1, 1, 1, POSITIONS, dtype=torch.bfloat16, device=device)
        with torch.no_grad():
            self.model(input_ids=self.ids, past_key_values=self.cache)  # which allocates it
            if device.type == "cuda":
                with rotary_kernel(model, device, torch.bfloat16) if load_extension() else contextlib.nullcontext():
                    self.step = as_graph(device, self._step)
            else:
                self.step = self._step

    @torch.no_grad()
    def _step(self) -> None:
        with self.cache.writing_at(self.place), using_decode_attention():
            self.model(
                input_ids=self.ids,
                position_ids=self.ids,
                attention_mask=self.mask,
                past_key_values=self.cache,
            )


def _without_products(model: torch.nn.Module) -> None:
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, torch.nn.Linear):
                setattr(module, name, _WithoutProduct(child))
