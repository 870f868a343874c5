"""A transformers model that an engine has loaded, made ready for anybody's calls."""

from __future__ import annotations

import atexit
import contextlib
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from zero_inference.api.calls import Calls, planned_for, scoring_bytes
from zero_inference.api.process import LOADED, free_memory, left_as_found
from zero_inference.config import RunConfig
from zero_inference.engines.base import LoadedModel
from zero_inference.errors import RunError, UsageError
from zero_inference.machine.machine import ThisMachine
from zero_inference.measure.session import loaded_model
from zero_inference.models.greedy import use_repeatable_attention
from zero_inference.models.spec import ModelSpec, load_tokenizer, resolve_model
from zero_inference.planning.changes import refuse_hopeless
from zero_inference.planning.checks import check_launch, check_model
from zero_inference.planning.plan import Plan, describe_job, make_plan
from zero_inference.records.failure import explain
from zero_inference.runtime import garbage
from zero_inference.runtime.distributed import Ranks, detect_ranks, hold_process_group
from zero_inference.runtime.progress import Progress
from zero_inference.search.choose import choose, hint

MAX_LENGTH = 2048  # tokens of a sequence where none is asked for
UNLOADED = "this model was unloaded; load it again with zero_inference.load()."


@dataclass
class _Held:
    """What a loaded model needs besides its modules.

    Attributes:
        releases: closes the engine, then lets go of the process group.
    """

    loaded: LoadedModel
    calls: Calls
    releases: ExitStack


def load_model(config: RunConfig, max_length: int | None, scoring: bool) -> Any:
    """See `loading.load`."""
    releases, progress = ExitStack(), Progress(enabled=config.verbose > 0)
    with left_as_found(config.verbose), contextlib.closing(progress):
        plan = _planned(config, max_length, scoring, progress)
        garbage.look_from_here()
        try:
            if plan.job.config.engine == "deepspeed":
                releases.callback(hold_process_group(plan.job.ranks))
            loaded, _ = releases.enter_context(loaded_model(plan, progress))
            return _made_usable(plan, loaded, releases)
        except BaseException as error:
            releases.close()
            free_memory()
            if isinstance(error, Exception) and not isinstance(error, (UsageError, RunError)):
                raise RunError(explain(error, plan.job.config)) from error
            raise


def _planned(config: RunConfig, max_length: int | None, scoring: bool, progress: Progress) -> Plan:
    machine, ranks = ThisMachine(), detect_ranks()
    if ranks.world_size > 1:
        raise UsageError(
            f"zero_inference.load() works in one process, and {ranks.world_size} were started: start one without a launcher."
        )
    check_launch(config, ranks, machine)
    spec = resolve_model(config, ranks.device.type)
    if max_length is None:
        max_length = min(MAX_LENGTH, spec.max_positions or MAX_LENGTH)
    elif spec.max_positions is not None and max_length > spec.max_positions:
        raise UsageError(f"max_length={max_length}: {spec.name} has {spec.max_positions} positions; use at most that.")
    config = planned_for(config, max_length)
    check_model(config, spec)
    config, chosen = choose(config, spec, ranks, machine, progress.say)
    if chosen is not None:
        check_launch(config, ranks, machine)
    if not spec.dummy:
        spec.checkpoint_folder()  # fetched now: time on the network is not time to load
    plan = make_plan(_job(config, spec, ranks, scoring))
    plan.check()
    refuse_hopeless(plan)
    if chosen is not None and (line := hint(plan, replace(chosen, goal="latency"))):  # a batch is what the caller has
        progress.say(line)
    return plan


def _job(config: RunConfig, spec: ModelSpec, ranks: Ranks, scoring: bool) -> Any:
    job = describe_job(config, spec, ranks)
    if job.free_device_bytes is None or not scoring:
        return job
    vocabulary = spec.text_config.vocab_size
    kv_bytes = 0 if config.kv_offload else job.kv_bytes()
    taken = scoring_bytes(config.batch_size, config.positions, vocabulary, spec.dtype.itemsize, kv_bytes)
    return replace(job, free_device_bytes=max(0, job.free_device_bytes - taken))


def _made_usable(plan: Plan, loaded: LoadedModel, releases: ExitStack) -> Any:
    model, job = loaded.model, plan.job
    use_repeatable_attention()
    calls = Calls(job.config, job.spec.config, loaded)
    model.generation_config = _generation_settings(job.spec)
    model.tokenizer = _tokenizer(job.spec)
    model.max_length = calls.max_length
    model.placement = _in_words(plan, loaded)
    kind = type(model)
    names = {
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
    }  # by which transformers finds what it knows of it
    model.__class__ = type(kind.__name__, (PlacedModel, kind), names)
    model._held = _Held(loaded, calls, releases)
    hook = model.register_forward_pre_hook(
        calls.before, with_kwargs=True, prepend=True
    )  # before an engine's own begins a pass
    releases.callback(hook.remove)
    LOADED.add(model)
    return model


def _generation_settings(spec: ModelSpec) -> Any:
    """As `from_pretrained` sets them."""
    from transformers import GenerationConfig

    folder = spec.snapshot.fetch_tokenizer() if spec.snapshot else spec.folder
    if not spec.dummy and folder is not None and Path(folder, "generation_config.json").is_file():
        return GenerationConfig.from_pretrained(folder)
    return GenerationConfig.from_model_config(spec.config)


def _tokenizer(spec: ModelSpec) -> Any:
    tokenizer = load_tokenizer(spec)
    if tokenizer is not None:
        tokenizer.padding_side = "left"
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _in_words(plan: Plan, loaded: LoadedModel) -> list[str]:
    config, footprint = plan.job.config, plan.weights.footprint
    places = {
        "on the GPU" if plan.job.on_gpu else "in this process": footprint.device - footprint.gathered,
        "in host memory": footprint.host,
        "on disk": footprint.disk,
    }
    parts = [f"{nbytes / 2**30:.2f} GiB {where}" for where, nbytes in places.items() if nbytes]
    return [
        f"engine {config.engine}, {config.quant_bits} bits: weights {', '.join(parts)}",
        *plan.weights.in_words(),
        f"memory for {config.batch_size} x {config.positions} tokens; keys and values "
        f"{'in host memory' if config.kv_offload else 'where the model computes'}",
    ]


class PlacedModel:
    """What `load` adds to a transformers class; see there."""

    _held: _Held | None

    @property
    def device(self) -> torch.device:
        """Where inputs go. Parameters may be elsewhere, or empty."""
        return self._need().loaded.device

    @property
    def dtype(self) -> torch.dtype:
        """Of activations. Parameters may be stored in codes."""
        return self._need().loaded.dtype

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """As transformers' `generate`, for what memory was planned for. Raises UsageError for more."""
        held, own = self._need(), super().generate  # type: ignore[misc]
        return own(**held.calls.generation(self, own, *args, **kwargs))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._need()
        return super().__call__(*args, **kwargs)  # type: ignore[misc]

    def tie_weights(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: they are tied, and plain parameters in their place would not be the engine's."""

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """The model as it is where that is what is asked for.

        Raises:
            UsageError: another device or dtype.
        """
        device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
        here, there = self.device, self.device if device is None else torch.device(device)
        if here.type != there.type or there.index not in (None, here.index) or dtype not in (None, self.dtype):
            raise UsageError(
                "the engine has placed the weights, and they cannot be moved or cast: load the model again."
            )
        return self

    def cuda(self, device: Any = None) -> Any:
        return self.to("cuda" if device is None else device)

    def cpu(self) -> Any:
        return self.to("cpu")

    def save_pretrained(self, *args: Any, **kwargs: Any) -> None:
        raise UsageError("weights that an engine holds cannot be saved: copy the checkpoint that they came from.")

    def unload(self) -> None:
        """Free the memory of weights, keys and values, end the engine's threads, remove its files. Safe to call twice."""
        held, self._held = self._held, None
        if held is None:
            return
        LOADED.discard(self)
        held.calls.forget()
        held.releases.close()
        for module in self.modules():  # type: ignore[attr-defined]
            for name in ("_hf_hook", "_old_forward", "forward"):
                module.__dict__.pop(name, None)
            for tensors in (module._parameters, module._buffers):
                for name in tensors:
                    tensors[name] = None
        del held  # or what the engine holds would outlive this
        free_memory()

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *error: Any) -> None:
        self.unload()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.unload()

    def _need(self) -> _Held:
        held = self.__dict__.get("_held")
        if held is None:
            raise UsageError(UNLOADED)
        return held


def unload_all() -> None:
    """Those that the program did not unload, before it ends."""
    for model in list(LOADED):
        model.unload()


atexit.register(unload_all)
