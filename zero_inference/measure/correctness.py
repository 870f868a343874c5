"""Check copies between GPUs, and the first passes of a loaded model: its decoder layers compute the same as transformers' with the same
weights, and logits are finite. Greedy selection would return ids from garbage and NaN, too."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from zero_inference.engines.base import EnginePlan, LoadedModel
from zero_inference.errors import RunError, UsageError
from zero_inference.models.checkpoint_files import shorten_names
from zero_inference.models.layers import COMPARED_BYTES, MAX_DIFFERENCE, decoder_layers, first_layer_bytes
from zero_inference.models.prompts import random_ids
from zero_inference.models.weights import observe_loading, return_free_memory
from zero_inference.utils.format import first_line
from zero_inference.utils.host_memory import host_copy
from zero_inference.utils.patching import Patches
from zero_inference.utils.ranks import Ranks

COMPARED_TOKENS = 4
COMPARED_TRIES = 3  # each with other tokens: for one token, rounding may choose other experts
COMPARED_SHARE = 0.25  # of the host memory that the run leaves free, at most
COPIED_BYTES = 1 << 20  # between GPUs, to try these copies
ROUNDINGS = 8  # allowed rounding errors of the output, which may be much larger than what a layer adds to its input


def check_copies_between(devices: Sequence[torch.device]) -> None:
    """Copy random bytes from each device to each other one. Raises RunError if they arrive changed: on some hosts with an IOMMU the driver
    reports peer access that does not work, and hidden states of one GPU would be garbage on the next."""
    sent = torch.randint(0, 256, (COPIED_BYTES,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    for source, target in itertools.permutations(devices, 2):
        if not torch.equal(sent.to(source).to(target).cpu(), sent):
            raise RunError(
                f"copies from {source} to {target} arrive changed: peer access between these GPUs does not work. Turn off the host's IOMMU "
                "or PCIe ACS, or use --num-gpus 1."
            )


class ReferenceLayers:
    """The first decoder layer of each kind as transformers runs it on a CPU, with the weights that the engine loads; on the first rank.
    Created before the engine loads; without `enabled` it has no layers.

    Attributes:
        layer_bytes: position in the model -> bytes of each of these layers, on all ranks.
        references: position -> the layer.
        skipped: position -> why that layer is not compared.
        holders: a parameter's name in the model -> modules of `references`, and their names for it.
    """

    def __init__(self, plan: EnginePlan, enabled: bool):
        job, weights = plan.job, plan.footprint
        self.job, self.quantize_dequantize = job, plan.quantize_dequantize
        self.references: dict[int, torch.nn.Module] = {}
        self.skipped: dict[int, str] = {}
        self.holders: dict[str, list[tuple[torch.nn.Module, str]]] = {}
        self.layer_bytes = first_layer_bytes(job.empty_model.model) if enabled else {}
        if not self.layer_bytes or not job.ranks.is_first:
            return
        layers = decoder_layers(job.empty_model.model)[1]
        names: dict[int, list[str]] = {}
        for name, parameter in job.empty_model.model.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
        run_bytes = weights.host + job.kv_host_bytes + (0 if job.on_gpu else weights.device)
        free_bytes = job.machine.available_host_bytes() - job.ranks.local_world_size * run_bytes
        budget_bytes = min(COMPARED_SHARE * free_bytes, COMPARED_BYTES)
        for position, nbytes in self.layer_bytes.items():
            if nbytes > budget_bytes:
                self.skipped[position] = "host memory has no room for it beside the model"
                continue
            budget_bytes -= nbytes
            reference = self.references[position] = copy.deepcopy(layers[position])
            for own_name, parameter in layers[position].named_parameters(remove_duplicate=False):
                module, _, leaf = own_name.rpartition(".")
                for name in names[id(parameter)]:
                    self.holders.setdefault(name, []).append((reference.get_submodule(module), leaf))

    def capture_weights(self) -> contextlib.AbstractContextManager[None]:
        """Return a block in which weights that are loaded fill these layers, too."""
        return observe_loading(self._store, self.holders)

    def _store(self, name: str, parameter: torch.nn.Parameter) -> None:
        if holders := self.holders.get(name):
            stored = self.quantize_dequantize(name, parameter.data)
            stored = stored if stored.device.type == "cpu" else host_copy(stored)
            values = torch.nn.Parameter(stored, requires_grad=False)
            for module, leaf in holders:
                module._parameters[leaf] = values

    @torch.no_grad()
    def compare(self, loaded: LoadedModel, say: Callable[[str], None]) -> None:
        """Run a few tokens through the loaded model, and compare its layers with the references on equal inputs. All ranks call it, once;
        `say` gets a line about layers that cannot be compared. Raises RunError on all ranks if a layer's output differs."""
        if not self.layer_bytes:
            return
        tokens, vocabulary, ranks = COMPARED_TOKENS, self.job.spec.text_config.vocab_size, self.job.ranks
        if loaded.cpu_backend is not None:  # the CPU computes blocks after a first pass, in passes of few tokens
            self._run(loaded, random_ids(0, 1, tokens, vocabulary))
            tokens = min(tokens, loaded.cpu_backend.rows)
        prefix, layers = decoder_layers(loaded.model)
        written = set(map(id, loaded.writable or loaded.model.parameters())) if self.job.sizes.writes_weights else set()
        for seed in range(COMPARED_TRIES):
            calls = self._run(loaded, random_ids(seed, 1, tokens, vocabulary))
            differing = [at for at, call in calls.items() if self._differs(at, layers[at], written, *call)]
            wrong = int(ranks.minimum(min(differing, default=len(layers))))
            if wrong == len(layers):
                break
        self.references, self.holders = {}, {}
        if wrong < len(layers):
            raise RunError(
                f"under --engine {self.job.config.engine}, {prefix}.{wrong} computes something else than transformers' own layer with the "
                f"same weights: {loaded.model.config.model_type} does not work with this engine and these options; use another engine."
            )
        for reason in dict.fromkeys(self.skipped.values()):
            which = shorten_names([f"layer {position}" for position, why in self.skipped.items() if why == reason])
            say(f"not compared with transformers' own code: decoder {which}: {reason}")
        return_free_memory()

    def _run(self, loaded: LoadedModel, ids: torch.Tensor) -> dict[int, list]:
        """Run `ids` [1, T] through the loaded model; return position -> [args, kwargs, output [1, T, H]] of each compared layer's first
        call, on the CPU."""
        calls: dict[int, list] = {}

        def before(position: int, args: tuple, kwargs: dict) -> None:
            if position not in calls:
                given = (args, kwargs)
                calls[position] = [*tree_map_only(torch.Tensor, lambda each: each.detach().to("cpu", copy=True), given)]

        def after(position: int, output: Any) -> None:
            if len(calls[position]) == 2:
                calls[position].append(_first_tensor(output).detach().cpu())

        with Patches() as hooks:
            for position in self.references:
                layer = decoder_layers(loaded.model)[1][position]
                hooks.add_hooks(
                    layer.register_forward_pre_hook(
                        lambda _, args, kwargs, at=position: before(at, args, kwargs), with_kwargs=True
                    ),
                    layer.register_forward_hook(lambda _, args, output, at=position: after(at, output)),
                )
            ids = ids.to(loaded.device)
            loaded.model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
        return calls

    def _differs(
        self, position: int, placed: Any, written: set[int], args: tuple, kwargs: dict, output: torch.Tensor
    ) -> bool:
        """Return whether at least half of the tokens differ by more than rounding. Fewer may, as rounding chooses between equal experts.
        `written`: ids of parameters whose values the pass may have changed."""
        reference = self.references[position]
        try:
            inputs = _first_tensor((*args, kwargs.get("hidden_states")))
            changed = [(name, each) for name, each in placed.named_parameters() if id(each) in written]
            for name, value in (*placed.named_buffers(), *changed):  # the checkpoint may have buffers
                module, _, leaf = name.rpartition(".")
                owner = reference.get_submodule(module)
                tensors: dict[str, Any] = owner._parameters if leaf in owner._parameters else owner._buffers
                tensors[leaf] = value.detach().cpu()
            expected = _first_tensor(reference(*args, **kwargs))
        except Exception as error:  # code that needs a GPU, or has state
            self.skipped[position] = f"its code does not run so: {first_line(error)}"
            return False
        if not torch.isfinite(expected).all():
            return False  # because of the weights
        eps, most = torch.finfo(expected.dtype).eps, MAX_DIFFERENCE[expected.dtype]
        added = expected - inputs if inputs.shape == expected.shape else expected
        # [B * T, H]
        added, expected, output = (each.double().reshape(-1, each.shape[-1]) for each in (added, expected, output))
        allowed = most * added.norm(dim=-1) + ROUNDINGS * eps * expected.norm(dim=-1)  # [B * T]
        close = (output - expected).norm(dim=-1) <= allowed
        return 2 * int(close.sum()) <= len(close)


def _first_tensor(values: Any) -> torch.Tensor:
    return values if torch.is_tensor(values) else next(value for value in values if torch.is_tensor(value))


class LogitsCheck:
    """Checks the raw logits of each forward of the first generation of `model`. The prefill alone is not enough: a later token may be the
    first to choose an expert. The check runs on the device without synchronization, so the generation may be a timed one."""

    def __init__(self, model: Any):
        self.model, self.hooks = model, Patches()
        self.finite: list[torch.Tensor] = []  # one bool a forward
        self.hooks.add_hooks(
            model.register_forward_hook(lambda _, args, output: self.finite.append(torch.isfinite(output.logits).all()))
        )

    def require_finite(self, dtype: torch.dtype, ranks: Ranks, again: Callable[[int], Any]) -> None:
        """Raise RunError on all ranks if logits of any rank have NaN or infinity; it names the token and the first such decoder layer. All
        ranks call it after each generation; only the first call acts. `again` generates so many tokens once more, to find the layer.
        """
        if not self.finite:
            return
        self.hooks.close()
        finite, self.finite = torch.stack(self.finite).tolist(), []
        token = 1 + int(ranks.minimum(finite.index(False) if False in finite else len(finite)))
        if token > len(finite):
            return
        overflow = "float16 overflows above 65504, use --dtype bfloat16 or float32"
        advice = overflow if dtype == torch.float16 else "check the weights there"
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
        finite[index] = torch.isfinite(_first_tensor(values)).all()

    with Patches() as hooks:
        hooks.add_hooks(
            model.register_forward_pre_hook(lambda *_: finite.clear()),
            layers[0].register_forward_pre_hook(
                lambda _, args, kwargs: check(-1, args or kwargs["hidden_states"]), with_kwargs=True
            ),
            *(
                layer.register_forward_hook(lambda _, args, output, index=index: check(index, output))
                for index, layer in enumerate(layers)
            ),
        )
        again()
    if not finite:
        return "as one CUDA graph it does not show its layers, use --decode-graph off to see where it begins"
    found = [index for index, is_finite in finite.items() if not is_finite]
    first = int(ranks.minimum(min(found, default=len(layers))))
    if first < 0:
        return "the embeddings are already not finite"
    after = "it begins after the decoder layers, in the last norm or the head"
    return f"it begins in {prefix}.{first}" if first < len(layers) else after
