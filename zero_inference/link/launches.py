"""What a step of generation takes whatever the model computes, of the host and of the device: found in models where nothing else counts."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from zero_inference.kv_cache.device import DeviceKVCache
from zero_inference.kv_cache.shared_keys import heads_share_keys
from zero_inference.link.compute import as_graph
from zero_inference.link.description import Launches
from zero_inference.models.greedy import greedy
from zero_inference.models.operators import trace_without_weights
from zero_inference.norms.patch import patch_norms
from zero_inference.runtime.extension import load_extension
from zero_inference.runtime.garbage import short_collections

LAYERS = 1, 16  # of two models of a kind: what these differ by are operators and modules
TOKENS = 32
ROUNDS = {"cuda": 5, "cpu": 3}  # of a visit
# Of the models whose steps are graphs: one whose kernels take as long as they do, and positions that its cache has room for.
GRAPH_WIDTH, GRAPH_HEAD_DIM, GRAPH_POSITIONS = 4096, 128, 160
MANY = 16  # sequences whose keys and values count beside what an operator takes
REPLAYS = 10


class Launching:
    """Small Llamas and OPTs of two sizes, of which a step takes `step_s`, `operator_s` for each operator and `module_s` for each call of a
    module: in a Llama's layer three of the one come with one of the other, in OPT's about as many.

    They take turns, and the fastest round of each counts: a host that others use may be half as fast for a second, and for a minute, so
    they are visited more than once. Measured one behind the other, they gave 3.7 ms a step on an H200's host, and a run took less than one.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.models = [_Steps(make(layers), device) for make in (_small_llama, _small_opt) for layers in LAYERS]
        self.in_graph = InGraph.measured(device) if device.type == "cuda" else None

    @short_collections()
    def visit(self) -> None:
        """Some seconds."""
        for _ in range(ROUNDS[self.device.type]):
            for model in self.models:
                model.measure()

    def found(self) -> Launches:
        """By all visits."""
        llama, more_llama, opt, more_opt = self.models
        operator_s, module_s = two_costs(more_llama.more_than(llama), more_opt.more_than(opt))
        return Launches(
            operator_s=operator_s,
            module_s=module_s,
            step_s=max(0.0, llama.step_s - llama.operators * operator_s - llama.module_calls * module_s),
            graph_operator_s=None if self.in_graph is None else self.in_graph.operator_s,
            attention_gb_per_s=None if self.in_graph is None else self.in_graph.attention_gb_per_s,
        )


def two_costs(one: tuple[int, int, float], other: tuple[int, int, float]) -> tuple[float, float]:
    """What an operator and a call of a module take, from numbers of both and seconds in `one` kind of model and in `other`; all of it is
    of operators where the two would not explain it."""
    operators, calls, seconds = one
    determinant = operators * other[1] - other[0] * calls
    if determinant:
        found = (
            (seconds * other[1] - other[2] * calls) / determinant,
            (operators * other[2] - other[0] * seconds) / determinant,
        )
        if min(found) >= 0:
            return found
    return max(0.0, seconds) / operators, 0.0


class _Steps:
    """Decode steps of a small model.

    Attributes:
        operators, module_calls: of a step.
        times_s: of generations, the fastest of each number of tokens.
    """

    def __init__(self, model: Any, device: torch.device):
        self.device = device
        counted = trace_without_weights(model.eval(), 1, TOKENS)
        assert counted is not None, "such models run on the meta device"
        self.operators, self.module_calls = counted.launches, counted.module_calls
        self.model = model.to(device, torch.bfloat16 if device.type == "cuda" else torch.float32)
        self.ids = torch.zeros(1, 8, dtype=torch.int64, device=device)
        self._generation_s(2)  # loads kernels
        self.times_s = dict.fromkeys((2, 2 + TOKENS), float("inf"))

    def measure(self) -> None:
        for tokens, fastest_s in self.times_s.items():
            self.times_s[tokens] = min(fastest_s, self._generation_s(tokens))

    @property
    def step_s(self) -> float:
        """What a long generation takes more than a short one, for each token."""
        few_s, many_s = self.times_s.values()
        return (many_s - few_s) / TOKENS

    def more_than(self, other: _Steps) -> tuple[int, int, float]:
        """Operators, calls of modules and seconds of a step that `other` has not."""
        return self.operators - other.operators, self.module_calls - other.module_calls, self.step_s - other.step_s

    def _generation_s(self, tokens: int) -> float:
        return seconds_of(
            self.device,
            lambda: self.model.generate(
                self.ids, generation_config=greedy(tokens), attention_mask=torch.ones_like(self.ids)
            ),
        )


def _small_opt(layers: int) -> Any:
    from transformers import OPTConfig, OPTForCausalLM

    return OPTForCausalLM(
        OPTConfig(
            hidden_size=64,
            ffn_dim=128,
            num_attention_heads=4,
            num_hidden_layers=layers,
            word_embed_proj_dim=64,
            vocab_size=256,
            max_position_embeddings=GRAPH_POSITIONS,
            bos_token_id=0,
            pad_token_id=1,
            eos_token_id=None,
        )
    ).requires_grad_(False)


def _small_llama(layers: int, width: int = 64, heads: int = 4) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=width,
            intermediate_size=2 * width,
            num_attention_heads=heads,
            num_key_value_heads=heads,
            num_hidden_layers=layers,
            vocab_size=256,
            max_position_embeddings=GRAPH_POSITIONS,
            bos_token_id=0,
            eos_token_id=None,
        )
    ).requires_grad_(False)


class _WithoutProduct(torch.nn.Module):
    """A linear module that returns the same memory each time, for one token of each sequence."""

    def __init__(self, like: torch.nn.Linear, batch: int):
        super().__init__()
        self.register_buffer("out", torch.zeros(batch, 1, like.out_features, device=like.weight.device))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, 1, columns] -> [batch, 1, rows]."""
        return self.out


@dataclass(frozen=True)
class InGraph:
    """Of a decoder layer without its products, whose operators wait for each other, in a CUDA graph.

    A Llama's layer with 40 heads took 43 us on an H200 besides its products, 1.4 us an operator, attention among them; a chain of sums of
    4096 elements, which had been measured instead, 0.96 each.

    Attributes:
        operator_s: of the device. A norm that a kernel of ours computes counts as many as transformers' own.
        attention_gb_per_s: what more sequences take longer, for their keys and values.
    """

    operator_s: float
    attention_gb_per_s: float | None

    @classmethod
    def measured(cls, device: torch.device, width: int = GRAPH_WIDTH) -> InGraph:
        few, many, several = (
            _StepWithoutProducts(layers, device, width, batch)
            for layers, batch in ((LAYERS[0], 1), (LAYERS[1], 1), (LAYERS[1], MANY))
        )
        few_s, many_s, several_s = (
            statistics.median(seconds_of(device, each.step) for _ in range(REPLAYS)) for each in (few, many, several)
        )
        longer_s, nbytes = several_s - many_s, several.cache.nbytes() - many.cache.nbytes()
        return cls(
            operator_s=max(0.0, many_s - few_s) / (many.operators - few.operators),
            attention_gb_per_s=nbytes / longer_s / 1e9 if longer_s > 0 else None,
        )


class _StepWithoutProducts:
    """
    Attributes:
        operators: of a step.
        step: repeats it; on CUDA as a graph.
    """

    def __init__(self, layers: int, device: torch.device, width: int, batch: int):
        with torch.device("meta"):
            model = _small_llama(layers, width, width // GRAPH_HEAD_DIM).eval()
        _without_products(model, batch)
        counted = trace_without_weights(model, 1, GRAPH_POSITIONS - 1)
        assert counted is not None, "a Llama runs on the meta device"
        self.operators = counted.launches
        rotary = type(model.model.rotary_emb)(model.config).to(device)
        model = model.to_empty(device=device).to(torch.bfloat16)
        model.model.rotary_emb = rotary
        for parameter in model.parameters():
            parameter.fill_(1.0)
        if load_extension():
            patch_norms(model)
        self.model, self.cache = model, DeviceKVCache(model.config, GRAPH_POSITIONS)
        self.ids = torch.zeros(batch, 1, dtype=torch.int64, device=device)
        self.place = self.ids.new_zeros(1)
        self.mask = torch.zeros(batch, 1, 1, GRAPH_POSITIONS, dtype=torch.bfloat16, device=device)
        with torch.no_grad():
            self.model(input_ids=self.ids, past_key_values=self.cache)  # which allocates it
            self.step = as_graph(device, self._step) if device.type == "cuda" else self._step

    @torch.no_grad()
    def _step(self) -> None:
        with self.cache.writing_at(self.place), heads_share_keys():
            self.model(
                input_ids=self.ids,
                position_ids=self.ids,
                attention_mask=self.mask,
                past_key_values=self.cache,
            )


def _without_products(model: torch.nn.Module, batch: int) -> None:
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, torch.nn.Linear):
                setattr(module, name, _WithoutProduct(child, batch))


def seconds_of(device: torch.device, action: Callable[[], object]) -> float:
    """Of one action, until the device has done it."""
    _wait_for(device)
    start = time.perf_counter()
    action()
    _wait_for(device)
    return time.perf_counter() - start


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
