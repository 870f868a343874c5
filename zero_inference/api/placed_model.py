"""PlacedModel: what `load` returns, a transformers model whose weights an engine has placed."""

from __future__ import annotations

import atexit
import contextlib
import copy
import functools
import inspect
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zero_inference.api.process import LOADED, free_memory, preserve_process_state
from zero_inference.config.run_config import RunConfig
from zero_inference.engines.base import Job, LoadedModel
from zero_inference.errors import RunError, UsageError
from zero_inference.hardware.machine import Machine
from zero_inference.kv_cache.device import DeviceKVCache, supports_preallocated
from zero_inference.measure.session import loaded_model
from zero_inference.models.prompts import disable_cudnn_attention
from zero_inference.models.spec import load_tokenizer, resolve_model
from zero_inference.planning.changes import check_memory
from zero_inference.planning.make_plan import make_plan
from zero_inference.planning.plan import Plan, build_job, check_launch, check_model
from zero_inference.planning.search import choose
from zero_inference.records.failure import explain_failure
from zero_inference.utils import interpreter
from zero_inference.utils.patching import Patches
from zero_inference.utils.progress import Progress
from zero_inference.utils.ranks import detect_ranks, hold_process_group

MAX_LENGTH = 2048  # tokens of a sequence without `max_length`
APPENDING_MODES = ("greedy_search", "sample")  # modes of generation that only append to keys and values
SUPPORTED_ADAPTERS = ("peft.tuners.lora.layer.Linear", "peft.tuners.lora.layer.Embedding")
HARMLESS_HOOKS = ("transformers.", "zero_inference.")  # packages whose hooks change no results
ENGINE_PACKAGES = ("zero_inference.", "deepspeed.", "accelerate.")  # whose code may set the data of parameters
CANNOT_MOVE = "the engine has placed the weights, and they cannot be moved or cast: load the model again."
_DEEPSPEED_LOCK = threading.RLock()  # DeepSpeed has one stack of running modules for the whole process
_of_parent: list[_State] = []  # in a forked child: the parent's models, whose release would free what the parent uses


@interpreter.reserve_stack
def load_model(config: RunConfig, max_length: int | None, scoring: bool) -> Any:
    """Plan, load and return a PlacedModel; see `zero_inference.load`."""
    releases, progress = ExitStack(), Progress(enabled=config.verbose > 0)
    with preserve_process_state(config.verbose), contextlib.closing(progress):
        plan = _plan(config, max_length, scoring, progress)
        interpreter.resume_collections()
        try:
            if plan.job.config.engine == "deepspeed":
                releases.callback(hold_process_group(plan.job.ranks))
            loaded, _, compare = releases.enter_context(loaded_model(plan, progress))
            compare()
            return _make_usable(plan, loaded, releases)
        except BaseException as error:
            releases.close()
            free_memory()
            if isinstance(error, Exception) and not isinstance(error, (UsageError, RunError)):
                raise RunError(explain_failure(error, plan.job.config, plan.job.ranks)) from error
            raise


def _plan(config: RunConfig, max_length: int | None, scoring: bool, progress: Progress) -> Plan:
    machine, ranks = Machine(), detect_ranks()
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
    if max_length < 2:
        raise UsageError(f"max_length={max_length}: a sequence is a prompt and at least one new token; use 2 or more.")
    # a prompt as long as a sequence may be, as a prefill's memory grows with it
    config = replace(config, prompt_len=max_length - 1, gen_len=1).validate()
    check_model(config, spec)
    config, _, empty_model = choose(config, spec, ranks, machine, progress.say)
    if not spec.dummy:
        spec.checkpoint_folder()  # fetched now: time on the network is not time to load
    job = build_job(config, spec, ranks, empty_model=empty_model)
    if job.free_device_bytes is not None and scoring:
        # logits [rows, length, vocabulary], two float32 copies of them that a log-softmax makes, and the KV cache of a plain call;
        # the plan may take the first device alone, or others with their part of the cache
        logits = config.batch_size * config.positions * spec.text_config.vocab_size * (spec.dtype.itemsize + 8)
        kv_bytes = job.state_bytes() + (0 if config.kv_offload else job.kv_bytes())
        first, *others = job.free_by_device
        part = kv_bytes // len(job.devices)
        free = first - logits - kv_bytes, *(each - part for each in others)
        job = replace(job, free_by_device=tuple(max(0, each) for each in free))
    plan = make_plan(job)
    plan.check()
    check_memory(plan)
    return plan


def _make_usable(plan: Plan, loaded: LoadedModel, releases: ExitStack) -> Any:
    """Make the loaded transformers model a PlacedModel: a subclass of its class, with checks, a lock, a tokenizer and a placement."""
    from transformers import GenerationConfig

    model, config, spec = loaded.model, plan.job.config, plan.job.spec
    disable_cudnn_attention()
    folder = spec.snapshot.fetch_tokenizer() if spec.snapshot else spec.folder
    if not spec.dummy and folder is not None and Path(folder, "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    else:
        model.generation_config = GenerationConfig.from_model_config(spec.config)
    model.tokenizer = load_tokenizer(spec)
    if model.tokenizer is not None:
        model.tokenizer.padding_side = "left"
        if model.tokenizer.pad_token is None:
            model.tokenizer.pad_token = model.tokenizer.eos_token
    model.max_length = config.positions
    model.placement = [
        f"engine {config.engine}, {plan.job.format_name}: weights {plan.engine_plan.describe_location()}",
        *plan.engine_plan.in_words(),
        f"memory for {config.batch_size} x {config.positions} tokens; keys and values "
        f"{'in host memory' if config.kv_offload else 'where the model computes'}",
    ]
    kind = type(model)
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}  # transformers looks these up
    model.__class__ = type(kind.__name__, (PlacedModel, kind), names)
    state = model._state = _State(plan.job, loaded, releases)
    patches, original = releases.enter_context(Patches()), model.forward

    @functools.wraps(original)  # generate looks at its arguments
    def forward(*args: Any, **kwargs: Any) -> Any:
        """The same as `model(...)`, for wrappers that call `model.forward(...)`: with hooks, checks and the lock."""
        if state.forward_thread == threading.get_ident():
            return original(*args, **kwargs)
        return model(*args, **kwargs)

    patches.set_attr(model, "forward", forward)
    # before the engine's own hook, which begins a pass
    patches.add_hooks(model.register_forward_pre_hook(state.pre_forward, with_kwargs=True, prepend=True))
    LOADED.add(model)
    return model


class _State:
    """The engine, lock and KV cache of a loaded model, and what its modules and weights were: changed ones are noticed before each call.

    Engines compute some blocks without calling the modules inside: on CPU workers, several products at once, or in CUDA graphs. They are
    told in which modules others were replaced, wrapped or hooked since, and call each module there from then on.

    Attributes:
        job: as planned, for `batch_size` sequences of `positions` tokens.
        releases: closes the engine, then releases the process group.
        forward_thread: the thread that holds the lock, while it is in the model's own forward.
        cache: of the last generation; the next one reuses its memory.
        frozen: weights may not change, other than those that the model itself writes.
    """

    def __init__(self, job: Job, loaded: LoadedModel, releases: ExitStack):
        self.job, self.config, self.loaded, self.releases = job, job.config, loaded, releases
        self.lock = _DEEPSPEED_LOCK if job.config.engine == "deepspeed" else threading.RLock()
        self.pid, self.calling, self.forward_thread = os.getpid(), False, 0
        self.cache: Any = None
        self.cache_rows = 0
        self.preallocated = loaded.preallocated_cache and supports_preallocated(loaded.model)
        self.frozen = job.config.engine != "resident"
        modules = list(loaded.model.modules())
        self.modules = set(modules)
        self.children = [(m, m._modules, name, child) for m in modules for name, child in m._modules.items()]
        hooked = [(m, hooks) for m in modules[1:] for hooks in (m._forward_pre_hooks, m._forward_hooks)]
        self.hooks = [(m, hooks, set(hooks)) for m, hooks in hooked]
        self.changed_modules: set[nn.Module] = set()
        self.adapters: list[Any] = []
        self.versions: dict[int, int] = {}  # by id; accelerate makes new parameters in each pass
        writable = set(map(id, loaded.writable))
        self.parameters = [
            (m._parameters, name, f"{path}.{name}".lstrip("."))
            for path, m in (loaded.model.named_modules() if self.frozen else ())
            for name, p in m._parameters.items()
            if p is not None and id(p) not in writable
        ]
        for holder, name, _ in self.parameters:
            parameter = dict.__getitem__(holder, name)  # DeepSpeed's [] fetches it
            parameter.__class__ = FrozenParameter
            self.versions[id(parameter)] = parameter._version

    @contextlib.contextmanager
    def call(self, model: Any) -> Iterator[None]:
        """Let one thread at a time call the model, after `check_changes`."""
        with self.lock:
            outermost, self.calling = not self.calling, True
            try:
                if outermost:
                    _state_of(model)  # another thread may have unloaded it
                    self.check_changes()
                # a backward pass would miss weights that have left the device
                with torch.set_grad_enabled(torch.is_grad_enabled() and not self.frozen):
                    yield
            finally:
                self.calling = not outermost

    def check_changes(self) -> None:
        """Report modules that were changed since the last call to the engine.
        Raises UsageError: weights were changed or replaced, or an adapter cannot be computed with them."""
        for holder, name, path in self.parameters:
            parameter = dict.get(holder, name)
            if type(parameter) is not FrozenParameter:
                raise refusal(f"parameter {path} was replaced")
            if not parameter.is_inference() and parameter._version != self.versions.get(id(parameter), 0):
                raise refusal(f"parameter {path} was changed in place since the last call")
        new = {m for m, children, name, child in self.children if children.get(name) is not child}
        for module, hooks, own in self.hooks:
            if len(hooks) != len(own):
                origins = [getattr(hook, "__module__", None) or "" for key, hook in hooks.items() if key not in own]
                if not all(origin.startswith(HARMLESS_HOOKS) for origin in origins):
                    new.add(module)
        changed = not new <= self.changed_modules
        if self.frozen and changed:
            added = set(self.loaded.model.modules()) - self.modules
            self.adapters = [m for m in added if type(m).__module__.startswith("peft.")]
        for adapter in self.adapters:
            _refuse_other_adapters(adapter)
        if changed:
            self.loaded.modules_changed(new)
            self.changed_modules |= new

    def check_size(self, rows: int, length: int) -> None:
        """Raise UsageError if `rows` sequences of `length` tokens exceed the planned memory."""
        planned, longest = self.config.batch_size, self.config.positions
        too_many = self.config.kv_offload and rows > planned  # its cache has a fixed number of rows
        if length <= longest and rows * length <= planned * longest and not too_many:
            return
        max_length = max(length, longest)
        batch_size = max(rows, planned) if too_many else max(planned, -(-rows * length // max_length))
        raise UsageError(
            f"this call has {rows} sequences of {length} tokens, and memory was planned for {planned} of {longest}: use "
            f"fewer or shorter ones, or load the model with batch_size={batch_size}, max_length={max_length}."
        )

    def generate_arguments(self, model: Any, generate: Callable[..., Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the arguments of `generate` by name, on the device, with a KV cache and a length that fit the plan.
        Raises UsageError: the call exceeds the planned memory."""
        given = inspect.signature(generate).bind_partial(*args, **kwargs).arguments
        call = {name: value for name, value in given.items() if name != "kwargs"} | given.get("kwargs", {})
        own_settings = call.get("generation_config")
        merged = copy.deepcopy(own_settings or model.generation_config)
        for name, value in call.items():
            if name != "generation_config" and hasattr(merged, name):
                setattr(merged, name, value)
        # [rows, tokens, ...]
        prompt = _first_batch(call.get(name) for name in ("input_ids", "inputs", "inputs_embeds"))
        rows, tokens = (1, 1) if prompt is None else prompt.shape[:2]
        rows *= max(merged.num_beams or 1, merged.num_return_sequences or 1)
        mode = str(getattr(merged.get_generation_mode(call.get("assistant_model")), "value", ""))
        caches = merged.use_cache is not False
        appends = mode in APPENDING_MODES and caches and not call.get("custom_generate")
        brings_cache = call.get("past_key_values") is not None or merged.cache_implementation is not None
        if self.config.kv_offload and caches and not brings_cache and not appends:
            raise UsageError(
                f"kv_offload=True keeps keys and values in host memory for greedy generation and sampling, not for {mode}: "
                "use one of these, or load the model without kv_offload."
            )
        self.check_size(rows, tokens)
        # A length of the caller that does not fit is refused, one of the checkpoint's settings is shortened. Without either transformers
        # has a default of its own, which `pre_forward` checks.
        for name, not_counted in {"max_new_tokens": tokens, "max_length": 0}.items():
            if asked := call.get(name) or getattr(own_settings, name, None):
                self.check_size(rows, not_counted + asked)
                break
        else:
            self.check_size(rows, tokens + 1)  # a prompt that fills the plan leaves no room for a new token
            planned, longest = self.config.batch_size, self.config.positions
            fitting = longest if rows <= planned else planned * longest // rows
            if merged.max_new_tokens:
                call["max_new_tokens"] = min(merged.max_new_tokens, fitting - tokens)
            elif merged.max_length:
                call["max_length"] = min(merged.max_length, fitting)
        if appends and not brings_cache:
            cache = self._next_cache(rows, returned=merged.return_dict_in_generate is True)
            if cache is not None:
                call["past_key_values"] = cache
        return {name: self._to_device(value) for name, value in call.items()}

    def _next_cache(self, rows: int, returned: bool) -> Any:
        """Return an empty cache for `rows` sequences, not reused if it is `returned` to the caller; None for transformers' own."""
        on_host = self.config.kv_offload
        if returned or (on_host and rows != self.cache_rows):
            self.cache = None  # before more memory is taken
        if on_host:
            self.cache, self.cache_rows = self._host_cache() if self.cache is None else self.cache, rows
            self.cache.reset()
        elif self.preallocated:
            if self.cache is None:
                self.cache = DeviceKVCache(self.job.spec.config, self.config.positions, self.config.batch_size)
            self.cache.begin(rows)
        found = self.cache
        if returned:
            self.cache = None
        return found

    def _host_cache(self) -> Any:
        make = self.loaded.cache_factory(self.config)
        assert make is not None, "kv_offload has a cache of this package"
        return make()

    def pre_forward(self, module: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
        """Forward pre-hook of the model: check the size, move inputs to the device, add a cache in host memory for kv_offload."""
        inputs = _first_batch((*args, kwargs.get("input_ids"), kwargs.get("inputs_embeds")))
        if inputs is None:
            return None
        cache = kwargs.get("past_key_values")
        past = cache.get_seq_length() if cache is not None else 0
        self.check_size(inputs.shape[0], past + inputs.shape[1])
        if not past and self.loaded.timeline is not None:
            self.loaded.timeline.restart()
        if self.config.kv_offload and cache is None and kwargs.get("use_cache") is not False:
            kwargs = {**kwargs, "past_key_values": self._host_cache()}
        return tuple(map(self._to_device, args)), {name: self._to_device(value) for name, value in kwargs.items()}

    def _to_device(self, value: Any) -> Any:
        return value.to(self.loaded.device) if torch.is_tensor(value) else value


def _first_batch(values: Iterable[Any]) -> torch.Tensor | None:
    return next((value for value in values if torch.is_tensor(value) and value.dim() >= 2), None)


def _refuse_other_adapters(module: Any) -> None:
    """Raise UsageError for a module of PEFT that needs more of its base layer than its product."""
    kind, reason = f"{type(module).__module__}.{type(module).__qualname__}", None
    if hasattr(module, "base_layer"):
        variants = getattr(module, "lora_variant", None)
        if kind not in SUPPORTED_ADAPTERS or variants:
            reason = f"adapter {kind}{' with a variant' if variants else ''}: LoRA on linear modules and embeddings works here"
        elif any(p.is_meta for name, p in module.named_parameters() if not name.startswith("base_layer.")):
            reason = "this adapter's weights were lost on the meta device, where accelerate has the model's"
    elif hasattr(module, "original_module"):
        reason = "this adapter replaces whole modules (modules_to_save), and their weights are the engine's"
    if reason is not None:
        raise UsageError(
            f"{reason}; merge the adapter into the plain model (merge_and_unload), save that, and load it, or use engine='resident'."
        )


def _state_of(model: Any) -> _State:
    """Return the state of a loaded model. Raises UsageError after `unload`, and in a forked process."""
    state = model.__dict__.get("_state")
    if state is None:
        raise UsageError("this model was unloaded; load it again with zero_inference.load().")
    if state.pid != os.getpid():
        raise UsageError(
            "this model was loaded before a fork, and its threads and device memory are the parent's: load it in this process, "
            "or start processes by 'spawn'."
        )
    return state


class PlacedModel:
    """The methods that `load` adds to a model's transformers class."""

    _state: _State | None

    @property
    def device(self) -> torch.device:
        """The device of inputs. Parameters may be elsewhere, or empty."""
        return _state_of(self).loaded.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of activations. Parameters may be quantized codes."""
        return _state_of(self).loaded.dtype

    @interpreter.reserve_stack
    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate as transformers does, within the planned memory. Raises UsageError beyond it."""
        state, generate = _state_of(self), super().generate  # type: ignore[misc]
        with state.call(self):
            return generate(**state.generate_arguments(self, generate, *args, **kwargs))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        state = _state_of(self)
        with state.call(self):
            # in this thread `forward` is a part of this call from now on
            before, state.forward_thread = state.forward_thread, threading.get_ident()
            try:
                return super().__call__(*args, **kwargs)  # type: ignore[misc]
            finally:
                state.forward_thread = before

    def load_adapter(self, *args: Any, **kwargs: Any) -> Any:
        """Load an adapter as transformers does. Raises UsageError where it cannot be computed with an engine's weights."""
        state = _state_of(self)
        with state.lock:
            found = super().load_adapter(*args, **kwargs)  # type: ignore[misc]
            state.check_changes()
        return found

    def tie_weights(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: weights are tied already, and new parameters would not be the engine's."""

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """Apply `to`, `half`, `float` or the like to each tensor. Raises UsageError if this moves or casts weights."""
        probe = torch.empty(0, dtype=self.dtype, device=self.device)
        converted, state = fn(probe), _state_of(self)
        if (converted.dtype, converted.device) != (probe.dtype, probe.device):
            raise UsageError(CANNOT_MOVE)
        if not state.frozen:
            return super()._apply(fn, recurse)  # type: ignore[misc]
        for module in set(self.modules()) - state.modules:  # type: ignore[attr-defined]
            nn.Module._apply(module, fn, recurse=False)
        return self

    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        """Load weights of adapters, as torch does. Raises UsageError for weights that an engine has placed."""
        named = self.named_parameters(remove_duplicate=False)  # type: ignore[attr-defined]
        if any(name in state_dict for name, parameter in named if isinstance(parameter, FrozenParameter)):
            raise refusal("load_state_dict()")
        return super().load_state_dict(state_dict, *args, **kwargs)  # type: ignore[misc]

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> Any:
        """Resize embeddings, with engine="resident". Raises UsageError with other engines, unless nothing changes."""
        if _state_of(self).frozen and (args or kwargs):
            raise refusal("resize_token_embeddings()")
        return super().resize_token_embeddings(*args, **kwargs)  # type: ignore[misc]

    def save_pretrained(self, *args: Any, **kwargs: Any) -> None:
        raise UsageError("weights that an engine holds cannot be saved: copy the checkpoint that they came from.")

    def unload(self) -> None:
        """Free the memory of weights, keys and values, end the engine's threads, remove its files. Safe to call twice."""
        state = self.__dict__.get("_state")
        if state is None:
            return
        if state.pid != os.getpid():
            _of_parent.append(state)
            return
        with state.lock:  # a call in another thread ends first
            if self._state is None:
                return
            self._state = None
            LOADED.discard(self)
            state.cache = None
            state.releases.close()
            for module in self.modules():  # type: ignore[attr-defined]
                for tensors in (module._parameters, module._buffers):
                    for name in tensors:
                        tensors[name] = None
            state = None  # or what the engine holds would outlive this
            free_memory()

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *error: Any) -> None:
        self.unload()

    def __del__(self) -> None:
        try:
            self.unload()
        except Exception:  # at the interpreter's exit modules are gone, contextlib too
            pass


@atexit.register
def unload_all() -> None:
    for model in list(LOADED):
        model.unload()


def refusal(what: str) -> UsageError:
    return UsageError(
        f"{what}: the engine has placed the weights, and they cannot be changed; change the checkpoint (or merge the adapter into it) "
        "and load that, or use engine='resident'."
    )


class FrozenParameter(nn.Parameter):
    """A parameter whose `data` only engines may set. Writes into its memory are noticed by its version, before the next call."""

    # else each operator would call Python
    __torch_function__ = torch._C._disabled_torch_function_impl

    @property
    def data(self) -> torch.Tensor:
        if _caller_is_engine():
            return torch.Tensor.data.__get__(self)
        if not self.numel():
            raise refusal("`data` of a parameter was read, which is fetched only for its pass")
        return self.detach()  # shares the version, which `data` does not

    @data.setter
    def data(self, values: torch.Tensor) -> None:
        if values is self:  # `Module.to` without a change
            return
        if not _caller_is_engine():
            raise refusal("`data` of a parameter was set")
        torch.Tensor.data.__set__(self, values)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """Return a plain parameter with the present values."""
        memo[id(self)] = nn.Parameter(copy.deepcopy(torch.Tensor.data.__get__(self)), self.requires_grad)
        return memo[id(self)]


def _caller_is_engine() -> bool:
    """Return whether the caller of this property is an engine's code."""
    return sys._getframe(2).f_globals.get("__name__", "").startswith(ENGINE_PACKAGES)
