"""Check the first passes of a loaded model: its decoder layers compute the same as transformers' with the same weights, and logits are
finite. Greedy selection would return ids from garbage and NaN, too."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from zero_inference.engines.base import EnginePlan, LoadedModel
from zero_inference.errors import RunError, UsageError
from zero_inference.models.layers import COMPARED_BYTES, decoder_layers, first_layer_bytes
from zero_inference.models.prompts import random_ids
from zero_inference.models.weights import observe_loading
from zero_inference.utils.format import first_line
from zero_inference.utils.host_memory import host_copy
from zero_inference.utils.ranks import Ranks

COMPARED_TOKENS = 4
# Each with other tokens: for one token, rounding may choose other experts.
COMPARED_TRIES = 3
COMPARED_SHARE = 0.25  # of the host memory that the run leaves free, at most
# As a share of what a layer adds to its input; as for CUDA graphs (engines/stream/cuda_graph.py). Garbage differs by 1 or more.
MOST_DIFFERENCE = {torch.bfloat16: 0.1, torch.float16: 0.03, torch.float32: 0.01}
ROUNDINGS = 8  # of the layer's output, whose input may be much larger than what the layer adds


class ReferenceLayers:
    """The first decoder layer of each kind as transformers runs it on a CPU, with the weights that the engine loads; on the first rank.
    Created before the engine loads.

    Attributes:
        references: the layers, by position in the model.
        skipped: position -> why that layer is not compared.
    """

    def __init__(self, plan: EnginePlan):
        job, self.quantize_dequantize = plan.job, plan.quantize_dequantize
        self.references: dict[int, torch.nn.Module] = {}
        self.skipped: dict[int, str] = {}
        self.places: dict[str, list[tuple[torch.nn.Module, str]]] = {}  # by a parameter's name in the model
        self.positions = first_layer_bytes(job.empty_model.model)
        if not self.positions or not job.ranks.is_first:
            return
        _, layers = decoder_layers(job.empty_model.model)
        names: dict[int, list[str]] = {}
        for name, parameter in job.empty_model.model.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
        weights = plan.footprint
        taken = weights.host + job.kv_host_bytes + (0 if job.on_gpu else weights.device)
        free = COMPARED_SHARE * (job.machine.available_host_bytes() - job.ranks.local_world_size * taken)
        free = min(free, COMPARED_BYTES)
        for position, nbytes in self.positions.items():
            if nbytes > free:
                self.skipped[position] = "host memory has no room for it beside the model"
                continue
            free -= nbytes
            self.references[position] = copy.deepcopy(layers[position])
            for own_name, parameter in layers[position].named_parameters(remove_duplicate=False):
                module, _, leaf = own_name.rpartition(".")
                for name in names[id(parameter)]:
                    self.places.setdefault(name, []).append((self.references[position].get_submodule(module), leaf))

    def capture_weights(self) -> contextlib.AbstractContextManager[None]:
        """Return a block in which weights that are loaded fill these layers, too."""
        return observe_loading(self._store)

    def _store(self, name: str, parameter: torch.nn.Parameter) -> None:
        if places := self.places.get(name):
            stored = self.quantize_dequantize(name, parameter.data)
            stored = stored if stored.device.type == "cpu" else host_copy(stored)
            values = torch.nn.Parameter(stored, requires_grad=False)
            for module, leaf in places:
                module._parameters[leaf] = values

    @torch.no_grad()
    def compare(self, loaded: LoadedModel, engine: str, vocabulary: int, ranks: Ranks) -> None:
        """Run a few tokens through the loaded model, and compare its layers with the references on equal inputs. All ranks call it, once.

        Raises:
            RunError: a layer's output differs; on all ranks.
        """
        if not self.positions:
            return
        tokens = COMPARED_TOKENS
        if loaded.cpu_backend is not None:  # the CPU computes blocks after a first pass, in passes of few tokens
            self._run(loaded, tokens, vocabulary, seed=0)
            tokens = min(tokens, loaded.cpu_backend.rows)
        prefix, layers = decoder_layers(loaded.model)
        for seed in range(COMPARED_TRIES):
            calls = self._run(loaded, tokens, vocabulary, seed)
            differing = [at for at, call in calls.items() if self._differs(at, layers[at], *call)]
            wrong = int(ranks.minimum(min(differing, default=len(layers))))
            if wrong == len(layers):
                break
        self.references, self.places = {}, {}
        if wrong < len(layers):
            raise RunError(
                f"under --engine {engine}, {prefix}.{wrong} computes something else than transformers' own layer with the same weights: "
                f"{loaded.model.config.model_type} does not work with this engine and these options; use another engine."
            )

    def _run(self, loaded: LoadedModel, tokens: int, vocabulary: int, seed: int) -> dict[int, Any]:
        """Run `tokens` random tokens through the loaded model, and return position -> (args, kwargs, output [1, tokens, H]) of the first
        call of each compared layer."""
        ids = random_ids(seed, 1, tokens, vocabulary).to(loaded.device)
        given: dict[int, Any] = {}
        calls: dict[int, Any] = {}

        def before(position: int, args: tuple, kwargs: dict) -> None:
            if position not in given:
                given[position] = _on_cpu((args, kwargs))

        def after(position: int, output: Any) -> None:
            if position in given and position not in calls:
                calls[position] = *given[position], _first_tensor(output).detach().cpu()

        hooks = []
        for position in self.references:
            layer = decoder_layers(loaded.model)[1][position]
            hooks += [
                layer.register_forward_pre_hook(
                    lambda _, args, kwargs, at=position: before(at, args, kwargs), with_kwargs=True
                ),
                layer.register_forward_hook(lambda _, args, output, at=position: after(at, output)),
            ]
        try:
            loaded.model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
        finally:
            for hook in hooks:
                hook.remove()
        return calls

    def _differs(self, position: int, placed: Any, args: tuple, kwargs: dict, output: torch.Tensor) -> bool:
        """Return whether most tokens differ by more than rounding. A few may: rounding chooses between two experts of equal score."""
        reference = self.references[position]
        try:
            inputs = _first_tensor((*args, kwargs.get("hidden_states")))
            for name, buffer in placed.named_buffers():  # the checkpoint may have them
                module, _, leaf = name.rpartition(".")
                reference.get_submodule(module)._buffers[leaf] = buffer.detach().cpu()
            expected = _first_tensor(reference(*args, **kwargs))
        except Exception as error:  # code that needs a GPU, or has state
            self.skipped[position] = f"its code does not run so: {first_line(error)}"
            return False
        if not torch.isfinite(expected).all():
            return False  # because of the weights
        eps, most = torch.finfo(expected.dtype).eps, MOST_DIFFERENCE[expected.dtype]
        added = expected - inputs if inputs.shape == expected.shape else expected
        added, expected, output = (
            each.double().reshape(-1, each.shape[-1]) for each in (added, expected, output)
        )  # [B * T, H]
        allowed = most * added.norm(dim=-1) + ROUNDINGS * eps * expected.norm(dim=-1)  # [B * T]
        return not bool(((output - expected).norm(dim=-1) <= allowed).double().median())


def _on_cpu(values: Any) -> Any:
    """Return a copy of a layer's arguments on the CPU."""
    return tree_map_only(torch.Tensor, lambda tensor: tensor.detach().to("cpu", copy=True), values)


def _first_tensor(values: Any) -> torch.Tensor:
    return values if torch.is_tensor(values) else next(value for value in values if torch.is_tensor(value))


class LogitsCheck:
    """Checks the raw logits of each forward of the first generation of `model`. The prefill alone is not enough: a later token may be the
    first to choose an expert.

    The check runs on the device without synchronization, so the generation may be a timed one; `require_finite` reads the results.
    """

    def __init__(self, model: Any):
        self.model = model
        self.finite: list[torch.Tensor] = []  # one bool a forward
        self.hook = model.register_forward_hook(
            lambda module, args, output: self.finite.append(torch.isfinite(output.logits).all())
        )

    def require_finite(self, dtype: torch.dtype, ranks: Ranks, again: Callable[[int], Any]) -> None:
        """Raise for logits that were not finite. All ranks call it after each generation; only the first call acts.

        Args:
            again: generates a number of tokens again, to find the layer in which it begins.

        Raises:
            RunError: logits of any rank have NaN or infinity; on all ranks; names the token and the first such decoder layer.
        """
        if not self.finite:
            return
        self.hook.remove()
        finite, self.finite = torch.stack(self.finite).tolist(), []
        token = 1 + int(ranks.minimum(finite.index(False) if False in finite else len(finite)))
        if token > len(finite):
            return
        advice = (
            "float16 overflows above 65504, use --dtype bfloat16 or float32"
            if dtype == torch.float16
            else "check the weights there"
        )
        where = _locate_first_nonfinite(self.model, ranks, lambda: again(token))
        which = "the prefill" if token == 1 else f"token {token}"
        raise RunError(f"the logits of {which} are not finite (NaN or infinity); {where}: {advice}")


def _locate_first_nonfinite(model: Any, ranks: Ranks, again: Callable[[], Any]) -> str:
    """Return in words where the first value that is not finite appears in the last forward of `again`, on any rank."""
    try:
        prefix, layers = decoder_layers(model)
    except UsageError:  # a model without a list of them
        return "its decoder layers are not known"
    finite: dict[int, torch.Tensor] = {}  # by layer; -1 is the input of the first

    def check(index: int, values: Any) -> None:
        values = values if torch.is_tensor(values) else values[0]
        finite[index] = torch.isfinite(values).all()

    def check_input(layer, args, named) -> None:
        check(-1, args or named["hidden_states"])

    hooks = [model.register_forward_pre_hook(lambda module, args: finite.clear())]
    hooks += [layers[0].register_forward_pre_hook(check_input, with_kwargs=True)]
    hooks += [
        layer.register_forward_hook(lambda layer, args, output, index=index: check(index, output))
        for index, layer in enumerate(layers)
    ]
    try:
        again()
    finally:
        for hook in hooks:
            hook.remove()
    if not finite:
        return "as one CUDA graph it does not show its layers, use --decode-graph off to see where it begins"
    first = int(
        ranks.minimum(min((index for index, is_finite in finite.items() if not is_finite), default=len(layers)))
    )
    if first < 0:
        return "the embeddings are already not finite"
    after = "it begins after the decoder layers, in the last norm or the head"
    return f"it begins in {prefix}.{first}" if first < len(layers) else after
