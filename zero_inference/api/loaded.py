"""A transformers model that an engine has loaded, made ready for anybody's calls."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from zero_inference.api.calls import Calls, planned_for, scoring_bytes
from zero_inference.api.process import LOADED, free_memory, left_as_found
from zero_inference.config.run_config import RunConfig
from zero_inference.engines.base import Job, LoadedModel
from zero_inference.errors import RunError, UsageError
from zero_inference.hardware.machine import LocalMachine
from zero_inference.measure.session import loaded_model
from zero_inference.models.empty_model import EmptyModel
from zero_inference.models.frozen import FrozenParameter, freeze, refusal
from zero_inference.models.prompts import disable_cudnn_attention
from zero_inference.models.spec import ModelSpec, load_tokenizer, resolve_model
from zero_inference.planning.changes import check_memory
from zero_inference.planning.choose import choose, hint
from zero_inference.planning.plan import Plan, build_job, check_launch, check_model, make_plan
from zero_inference.records.failure import explain_failure
from zero_inference.utils import garbage
from zero_inference.utils.format import format_bytes
from zero_inference.utils.progress import Progress
from zero_inference.utils.ranks import Ranks, detect_ranks, hold_process_group

MAX_LENGTH = 2048  # tokens of a sequence where none is asked for
UNLOADED = "this model was unloaded; load it again with zero_inference.load()."
FORKED = (
    "this model was loaded before a fork, and its threads and device memory are the parent's: load it in this process, or start "
    "processes by 'spawn'."
)
CANNOT_MOVE = "the engine has placed the weights, and they cannot be moved or cast: load the model again."
MERGE_FIRST = (
    "merge the adapter into the plain model (merge_and_unload), save that, and load it, or use engine='resident'"
)
SUPPORTED_ADAPTERS = ("peft.tuners.lora.layer.Linear", "peft.tuners.lora.layer.Embedding")
OWN_HOOKS = ("transformers.", "zero_inference.")  # these change nothing that a module computes
_DEEPSPEED = threading.RLock()  # its stack of modules under way is the process's
_of_parent: list[_Held] = []  # in a forked child: what it must not release


@dataclass
class _Held:
    """What a loaded model needs besides its modules.

    Attributes:
        releases: closes the engine, then lets go of the process group.
        lock: held by the thread whose call is under way.
        pid: the process that loaded the model.
    """

    loaded: LoadedModel
    calls: Calls
    releases: ExitStack
    modules: _AsLoaded
    lock: Any = field(default_factory=threading.RLock)
    pid: int = field(default_factory=os.getpid)
    calling: bool = False  # a call of the model is under way in the thread that holds the lock
    forward_in: int = 0  # that thread, while the model's own forward is under way in it

    @contextlib.contextmanager
    def call(self, model: Any) -> Iterator[None]:
        """Let one thread at a time call the model, after `modules.check`."""
        with self.lock:
            outermost, self.calling = not self.calling, True
            try:
                if outermost:
                    _need(model)  # another thread may have unloaded it meanwhile
                    self.modules.check()
                # without the weights, which have left the device by then, no gradient is right
                with torch.set_grad_enabled(torch.is_grad_enabled() and not self.modules.frozen):
                    yield
            finally:
                self.calling = not outermost


def load_model(config: RunConfig, max_length: int | None, scoring: bool) -> Any:
    """See `loading.load`."""
    releases, progress = ExitStack(), Progress(enabled=config.verbose > 0)
    with left_as_found(config.verbose), contextlib.closing(progress):
        plan = _planned(config, max_length, scoring, progress)
        garbage.resume_collections()
        try:
            if plan.job.config.engine == "deepspeed":
                releases.callback(hold_process_group(plan.job.ranks))
            loaded, _, compare = releases.enter_context(loaded_model(plan, progress))
            compare()
            return _made_usable(plan, loaded, releases)
        except BaseException as error:
            releases.close()
            free_memory()
            if isinstance(error, Exception) and not isinstance(error, (UsageError, RunError)):
                raise RunError(explain_failure(error, plan.job.config, plan.job.ranks)) from error
            raise


def _planned(config: RunConfig, max_length: int | None, scoring: bool, progress: Progress) -> Plan:
    machine, ranks = LocalMachine(), detect_ranks()
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
    config, chosen, empty_model = choose(config, spec, ranks, machine, progress.say)
    if chosen is not None:
        check_launch(config, ranks, machine)
    if not spec.dummy:
        spec.checkpoint_folder()  # fetched now: time on the network is not time to load
    plan = make_plan(_job(config, spec, ranks, scoring, empty_model))
    plan.check()
    check_memory(plan)
    if chosen is not None and (line := hint(plan, replace(chosen, goal="latency"))):  # a batch is what the caller has
        progress.say(line)
    return plan


def _job(config: RunConfig, spec: ModelSpec, ranks: Ranks, scoring: bool, empty_model: EmptyModel | None) -> Job:
    job = build_job(config, spec, ranks, empty_model=empty_model)
    if job.free_device_bytes is None or not scoring:
        return job
    vocabulary = spec.text_config.vocab_size
    kv_bytes = job.state_bytes() + (0 if config.kv_offload else job.kv_bytes())
    taken = scoring_bytes(config.batch_size, config.positions, vocabulary, spec.dtype.itemsize, kv_bytes)
    return replace(job, free_device_bytes=max(0, job.free_device_bytes - taken))


def _made_usable(plan: Plan, loaded: LoadedModel, releases: ExitStack) -> Any:
    model, job = loaded.model, plan.job
    disable_cudnn_attention()
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
    frozen = job.config.engine != "resident"
    modules = _AsLoaded(model, frozen, loaded.modules_changed, loaded.writable)
    model._held = _Held(loaded, calls, releases, modules)
    if job.config.engine == "deepspeed":
        model._held.lock = _DEEPSPEED
    _redirect_forward(model)
    hook = model.register_forward_pre_hook(
        calls.before, with_kwargs=True, prepend=True
    )  # before an engine's own begins a pass
    releases.callback(hook.remove)
    LOADED.add(model)
    return model


def _redirect_forward(model: Any) -> None:
    """Let `model.forward(...)`, as wrappers of a model call it, be `model(...)`: with hooks, checks and the lock."""
    own, held = model.forward, model._held

    @functools.wraps(own)  # generate looks at its arguments
    def forward(*args: Any, **kwargs: Any) -> Any:
        if held.forward_in == threading.get_ident():
            return own(*args, **kwargs)
        return model(*args, **kwargs)

    model.forward = forward


class _AsLoaded:
    """The modules of a model as its engine knows them: what was put in their place or hooked to them since.

    Engines compute some blocks without calling the modules inside: CPU workers, products of several modules at once, CUDA graphs.

    Args:
        frozen: weights may not change.
        changed: told the modules in which the engine has to call each module from now on.
        writable: parameters that may change all the same.
    """

    def __init__(
        self,
        model: Any,
        frozen: bool,
        changed: Callable[[set[torch.nn.Module]], None],
        writable: Sequence[torch.nn.Parameter] = (),
    ):
        modules = list(model.modules())
        self.changed, self.known = changed, set(modules)
        self.model, self.frozen = model, frozen
        self.children = [(m, m._modules, name, child) for m in modules for name, child in m._modules.items()]
        self.hooks = [
            (m, hooks, set(hooks))
            for m in modules
            for hooks in (m._forward_pre_hooks, m._forward_hooks)
            if m is not model
        ]
        self.reported: set[torch.nn.Module] = set()
        self.adapters: list[Any] = []
        self.parameters: list[tuple[dict[str, Any], str]] = []
        self.versions: dict[int, int] = {}  # by id; accelerate makes new parameters in each pass
        if frozen:
            free = set(map(id, writable))
            self.parameters = [
                (m._parameters, name)
                for m in modules
                for name, p in m._parameters.items()
                if p is not None and id(p) not in free
            ]
            placed = [
                dict.__getitem__(holder, name) for holder, name in self.parameters
            ]  # DeepSpeed's [] would fetch it
            for parameter in placed:
                freeze(parameter)
            self.versions = {id(parameter): parameter._version for parameter in placed}

    def check(self) -> None:
        """Tell the engine which modules were wrapped, replaced or hooked since the last call; called before each.

        Raises:
            UsageError: weights were changed or replaced, or an adapter cannot be computed with them.
        """
        for holder, name in self.parameters:
            parameter = dict.get(holder, name)
            if type(parameter) is not FrozenParameter:
                raise refusal("a parameter was replaced")
            if not parameter.is_inference() and parameter._version != self.versions.get(id(parameter), 0):
                raise refusal("a parameter was changed in place")
        new = {m for m, children, name, child in self.children if children.get(name) is not child}
        new |= {m for m, hooks, own in self.hooks if len(hooks) != len(own) and _adds_to(hooks, own)}
        if self.frozen and not new <= self.reported:
            self.adapters = [
                m for m in self.model.modules() if m not in self.known and type(m).__module__.startswith("peft.")
            ]
        for adapter in self.adapters:
            _refuse_other_adapters(adapter)
        if not new <= self.reported:
            self.changed(new)
            self.reported |= new


def _adds_to(hooks: dict[int, Any], own: set[int]) -> bool:
    """Return whether a hook that is not in `own` may change what is computed, or wants to see it."""
    return any(
        not (getattr(hook, "__module__", None) or "").startswith(OWN_HOOKS)
        for key, hook in hooks.items()
        if key not in own
    )


def _refuse_other_adapters(module: Any) -> None:
    """Raises UsageError for a module of PEFT that needs more of its base layer than the layer's product."""
    kind = f"{type(module).__module__}.{type(module).__qualname__}"
    if hasattr(module, "base_layer"):
        variants = getattr(module, "lora_variant", None)
        if kind not in SUPPORTED_ADAPTERS or variants:
            what = f"{type(next(iter(variants.values()))).__name__}" if variants else kind.removeprefix("peft.tuners.")
            raise UsageError(
                f"adapter {what}: of PEFT, LoRA on linear modules and embeddings works here; {MERGE_FIRST}."
            )
        if any(p.is_meta for name, p in module.named_parameters() if not name.startswith("base_layer.")):
            raise UsageError(
                f"this adapter's weights were lost on the meta device, where accelerate has the model's: {MERGE_FIRST}."
            )
    elif hasattr(module, "original_module"):
        raise UsageError(
            f"this adapter replaces whole modules (modules_to_save), and their weights are the engine's: {MERGE_FIRST}."
        )


def _need(model: Any) -> _Held:
    held = model.__dict__.get("_held")
    if held is None:
        raise UsageError(UNLOADED)
    if held.pid != os.getpid():
        raise UsageError(FORKED)
    return held


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
    parts = [f"{format_bytes(nbytes)} {where}" for where, nbytes in places.items() if nbytes]
    return [
        f"engine {config.engine}, {config.quant_bits} bits: weights and their buffers {', '.join(parts)}",
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
        return _need(self).loaded.device

    @property
    def dtype(self) -> torch.dtype:
        """Of activations. Parameters may be stored in codes."""
        return _need(self).loaded.dtype

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """As transformers' `generate`, for what memory was planned for. Raises UsageError for more."""
        held, own = _need(self), super().generate  # type: ignore[misc]
        with held.call(self):
            return own(**held.calls.generation(self, own, *args, **kwargs))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        held = _need(self)
        with held.call(self):
            before, held.forward_in = held.forward_in, threading.get_ident()
            try:
                return super().__call__(*args, **kwargs)  # type: ignore[misc]
            finally:
                held.forward_in = before

    def load_adapter(self, *args: Any, **kwargs: Any) -> Any:
        """Load an adapter as transformers does. Raises UsageError where it cannot be computed with an engine's weights."""
        held = _need(self)
        with held.lock:
            found = super().load_adapter(*args, **kwargs)  # type: ignore[misc]
            held.modules.check()
        return found

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
            raise UsageError(CANNOT_MOVE)
        return self

    def cuda(self, device: Any = None) -> Any:
        return self.to("cuda" if device is None else device)

    def cpu(self) -> Any:
        return self.to("cpu")

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """Apply what `half`, `float` and a wrapper's `to` do to each tensor. Raises UsageError where it moves or casts weights."""
        here = torch.empty(0, dtype=self.dtype, device=self.device)
        there, held = fn(here), _need(self)
        if (there.dtype, there.device) != (here.dtype, here.device):
            raise UsageError(CANNOT_MOVE)
        if not held.modules.frozen:
            return super()._apply(fn, recurse)  # type: ignore[misc]
        for module in set(self.modules()) - held.modules.known:  # type: ignore[attr-defined]
            torch.nn.Module._apply(module, fn, recurse=False)
        return self

    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        """Load weights of adapters, as torch does. Raises UsageError for weights that an engine has placed."""
        named = self.named_parameters(remove_duplicate=False)  # type: ignore[attr-defined]
        if any(name in state_dict for name, parameter in named if isinstance(parameter, FrozenParameter)):
            raise refusal("load_state_dict()")
        return super().load_state_dict(state_dict, *args, **kwargs)  # type: ignore[misc]

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> Any:
        """Resize embeddings as transformers does with engine="resident". Raises UsageError with other engines, unless nothing changes."""
        if _need(self).modules.frozen and (args or kwargs):
            raise refusal("resize_token_embeddings()")
        return super().resize_token_embeddings(*args, **kwargs)  # type: ignore[misc]

    def save_pretrained(self, *args: Any, **kwargs: Any) -> None:
        raise UsageError("weights that an engine holds cannot be saved: copy the checkpoint that they came from.")

    def unload(self) -> None:
        """Free the memory of weights, keys and values, end the engine's threads, remove its files. Safe to call twice."""
        held = self.__dict__.get("_held")
        if held is None:
            return
        if held.pid != os.getpid():
            _of_parent.append(held)
            return
        lock = held.lock
        del held
        with lock:  # a call in another thread ends first
            self._release()

    def _release(self) -> None:
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


def unload_all() -> None:
    """Those that the program did not unload, before it ends."""
    for model in list(LOADED):
        model.unload()


atexit.register(unload_all)
