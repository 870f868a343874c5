"""Measure launch overhead with models so small that nothing else takes time: host time per operator and module call, device time per
small kernel in a CUDA graph."""

from __future__ import annotations

import contextlib
import statistics
from typing import Any

import torch

from zero_inference.hardware.bench_device import attention_s, measure_device_attention
from zero_inference.hardware.profile import LaunchOverhead
from zero_inference.hardware.rates import ATTENTION_HEAD_DIM
from zero_inference.kernels.decode_attention import using_decode_attention
from zero_inference.kernels.extension import load_extension
from zero_inference.kernels.rotary import rotary_kernel
from zero_inference.kv_cache.device import DeviceKVCache
from zero_inference.models.prompts import disable_cudnn_attention, greedy_config
from zero_inference.models.tracing import trace_pass
from zero_inference.norms.patch import patch_norms
from zero_inference.utils.garbage import freeze_existing_objects
from zero_inference.utils.timing import capture_graph, measure_median_s, time_wall_s

LAYERS = 1, 16  # of two models of a family, whose difference in operators and module calls is measured
TOKENS = 16  # decode steps of a measured generation
ROUNDS = 3  # measurements of each model in a visit
GRAPH_WIDTH = 4096  # hidden size at which small kernels take as long as those of usual models
GRAPH_S = 0.05  # for which a graph is replayed
POSITIONS = 160  # of the small models


class LaunchBench:
    """Times decode steps of small Llamas and OPTs of two sizes, to solve for the time of an operator, a module call and a step.

    A Llama's layer has three operators for each module call, OPT's about one. Models alternate, in several visits, and the median counts,
    because a shared host may be half as fast for a second or a minute: measured one after the other they gave 3.7 ms a step on an H200's
    host, where a run took less than one.
    """

    def __init__(self, device: torch.device):
        disable_cudnn_attention()
        self.device = device
        self.models = [_SmallModel(make(layers), device) for make in (small_llama, small_opt) for layers in LAYERS]
        self.attention = measure_device_attention(device) if device.type == "cuda" else ()
        self.graph_operator_s = measure_graph_operator(device) if device.type == "cuda" else None

    @freeze_existing_objects()
    def visit(self) -> None:
        """Measure each model `ROUNDS` times, in a second or two."""
        for _ in range(ROUNDS):
            for model in self.models:
                model.measure()

    def result(self) -> LaunchOverhead:
        """Return the launch overhead by the medians of all visits; least squares of two equations, without negative costs."""
        import numpy as np
        from scipy.optimize import nnls

        steps = [(each.operators, each.module_calls, statistics.median(each.rounds_s)) for each in self.models]
        llama, large_llama, opt, large_opt = np.array(steps)
        equations = np.stack([large_llama - llama, large_opt - opt])
        (operator_s, module_s), _ = nnls(equations[:, :2], equations[:, 2])
        operators, module_calls, step_s = steps[0]
        return LaunchOverhead(
            operator_s=float(operator_s),
            module_s=float(module_s),
            step_s=max(0.0, float(step_s - operators * operator_s - module_calls * module_s)),
            graph_operator_s=self.graph_operator_s,
            attention=self.attention,
        )


class _SmallModel:
    """A small model whose decode steps are timed, with our norm and rotary kernels as in a run on a GPU.

    `operators` and `module_calls` of a step are counted with transformers' own code, as by a plan; `rounds_s` has the seconds of a step.
    """

    def __init__(self, model: Any, device: torch.device):
        self.device = device
        counted = trace_pass(model.eval(), None, 1, TOKENS)
        assert counted is not None, "OPT and Llama run on the meta device"
        self.operators, self.module_calls = counted.launches, counted.module_calls
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.model = model.to(device, self.dtype)
        self.ids = torch.zeros(1, 8, dtype=torch.int64, device=device)
        self.fuses = device.type == "cuda" and load_extension()
        if self.fuses:
            patch_norms(self.model)
        self._generation_s(2)  # loads kernels
        self.rounds_s: list[float] = []

    def measure(self) -> None:
        few_s, many_s = self._generation_s(2), self._generation_s(2 + TOKENS)
        self.rounds_s.append((many_s - few_s) / TOKENS)

    def _generation_s(self, tokens: int) -> float:
        options = {"generation_config": greedy_config(tokens), "attention_mask": torch.ones_like(self.ids)}
        with rotary_kernel(self.model, self.device, self.dtype) if self.fuses else contextlib.nullcontext():
            return time_wall_s(self.device, lambda: self.model.generate(self.ids, **options))


def measure_graph_operator(device: torch.device, width: int = GRAPH_WIDTH) -> float:
    """Return the device time of an operator of a decoder layer in a CUDA graph, without products and attention.

    A Llama's layer with 40 heads took 43 us on an H200 besides its products; a chain of sums of 4096 elements instead took 0.96 us an
    operator (h200-kept/seventh_host: resident.txt, machine.json). Our norm and rotary kernels count as many operators as transformers'
    own code has.
    """
    small, large = (_StepWithoutProducts(layers, device, width) for layers in LAYERS)
    small_s, large_s = (measure_median_s(device, each.step, GRAPH_S) for each in (small, large))
    layers = LAYERS[1] - LAYERS[0]
    layer_s = max(0.0, large_s - small_s) / layers
    operators = (large.operators - small.operators) / layers  # of a layer, one of them attention
    heads = width // ATTENTION_HEAD_DIM
    layer_attention_s = attention_s(device, 1, heads, POSITIONS, key_heads_per_sequence=heads, layers=LAYERS[1])
    return max(0.0, layer_s - layer_attention_s) / (operators - 1)


class _NoProduct(torch.nn.Module):
    """Replaces a linear module: returns the same zeros for any input."""

    def __init__(self, like: torch.nn.Linear):
        super().__init__()
        self.register_buffer("out", torch.zeros(1, 1, like.out_features, device=like.weight.device))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[1, 1, columns] -> [1, 1, rows]."""
        return self.out


class _StepWithoutProducts:
    """A decode step of a Llama without matrix products. `step()` runs it, on CUDA as a graph; `operators` is their number in a step."""

    def __init__(self, layers: int, device: torch.device, width: int):
        disable_cudnn_attention()
        with torch.device("meta"):
            model = small_llama(layers, width, width // ATTENTION_HEAD_DIM).eval()
        for name, module in list(model.named_modules()):
            if isinstance(module, torch.nn.Linear):
                model.set_submodule(name, _NoProduct(module))
        counted = trace_pass(model, None, 1, POSITIONS - 1)
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
        self.position = self.ids.new_zeros(1)
        self.mask = torch.zeros(1, 1, 1, POSITIONS, dtype=torch.bfloat16, device=device)
        with torch.no_grad():
            self.model(input_ids=self.ids, past_key_values=self.cache)  # allocates the cache
            if device.type == "cuda":
                with rotary_kernel(model, device, torch.bfloat16) if load_extension() else contextlib.nullcontext():
                    self.step = capture_graph(device, self._step)
            else:
                self.step = self._step

    @torch.no_grad()
    def _step(self) -> None:
        with self.cache.writing_at(self.position), using_decode_attention():
            self.model(input_ids=self.ids, position_ids=self.ids, attention_mask=self.mask, past_key_values=self.cache)


COMMON = dict(vocab_size=256, max_position_embeddings=POSITIONS, bos_token_id=0, pad_token_id=1, eos_token_id=None)


def small_opt(layers: int) -> Any:
    from transformers import OPTConfig, OPTForCausalLM

    sizes = dict(hidden_size=64, ffn_dim=128, num_attention_heads=4, word_embed_proj_dim=64)
    return OPTForCausalLM(OPTConfig(num_hidden_layers=layers, **sizes, **COMMON)).requires_grad_(False)


def small_llama(layers: int, width: int = 64, heads: int = 4) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = dict(hidden_size=width, intermediate_size=2 * width, num_attention_heads=heads, num_key_value_heads=heads)
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, **sizes, **COMMON)).requires_grad_(False)
