"""The memory of calls of a loaded model: a limit by what was planned, and a KV cache for each generation."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from zero_inference.config.run_config import RunConfig
from zero_inference.engines.base import LoadedModel
from zero_inference.errors import UsageError
from zero_inference.kv_cache.choose import cache_factory
from zero_inference.kv_cache.device import DeviceKVCache, supports_preallocated

APPENDING_MODES = ("greedy_search", "sample")  # modes of generation that only append to keys and values


@dataclass
class CallMemory:
    """Checks each call against the plan, and gives generations their KV cache.

    Attributes:
        config: as planned, for `batch_size` sequences of `positions` tokens.
        cache, cache_rows: of the last generation; the next one reuses its memory.
    """

    config: RunConfig
    model_config: Any
    loaded: LoadedModel
    cache: Any = None
    cache_rows: int = 0

    def __post_init__(self) -> None:
        self.preallocated = self.loaded.preallocated_cache and supports_preallocated(self.loaded.model)

    def check(self, rows: int, length: int) -> None:
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

        Raises:
            UsageError: the call exceeds the planned memory.
        """
        given = inspect.signature(generate).bind_partial(*args, **kwargs).arguments
        call = {name: value for name, value in given.items() if name != "kwargs"} | given.get("kwargs", {})
        own_settings = call.get("generation_config")
        merged = copy.deepcopy(own_settings or model.generation_config)
        for name, value in call.items():
            if name != "generation_config" and hasattr(merged, name):
                setattr(merged, name, value)
        prompts = (call[name] for name in ("input_ids", "inputs", "inputs_embeds") if _is_batch(call.get(name)))
        prompt = next(prompts, None)  # [rows, tokens, ...]
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
        self.check(rows, tokens)
        # A given length that does not fit is refused, one of the checkpoint's settings is shortened. Without either transformers has a
        # default of its own, which the hook before each call checks.
        before = {"max_new_tokens": tokens, "max_length": 0}
        asked: dict[str, Any] = {name: call.get(name) or getattr(own_settings, name, None) for name in before}
        name = next((name for name in before if asked[name]), None)
        own_name = next((name for name in before if getattr(merged, name, None)), None)
        if name is not None:
            self.check(rows, before[name] + asked[name])
        elif own_name is not None:
            planned, longest = self.config.batch_size, self.config.positions
            fitting = longest if rows <= planned else planned * longest // rows
            call[own_name] = min(getattr(merged, own_name), fitting - before[own_name])
        if appends and not brings_cache:
            cache = self._next_cache(rows, returned=merged.return_dict_in_generate is True)
            if cache is not None:
                call["past_key_values"] = cache
        return {name: _to_device(value, self.loaded.device) for name, value in call.items()}

    def _next_cache(self, rows: int, returned: bool) -> Any:
        """Return an empty cache for `rows` sequences; None to use transformers' own.

        Args:
            returned: the caller gets the cache, so the next generation needs another one.
        """
        if returned:
            self.forget_cache()
        if self.config.kv_offload:
            if self.cache is None or self.cache_rows != rows:
                self.forget_cache()  # before more memory is taken
                self.cache, self.cache_rows = self._host_cache(), rows
            self.cache.reset()
        elif self.preallocated:
            if self.cache is None:
                self.cache = DeviceKVCache(self.model_config, self.config.positions, self.config.batch_size)
            self.cache.begin(rows)
        found = self.cache
        if returned:
            self.forget_cache()
        return found

    def forget_cache(self) -> None:
        self.cache, self.cache_rows = None, 0

    def pre_forward(self, module: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
        """Forward pre-hook of the model: check the size, move inputs to the device, add a cache in host memory for kv_offload."""
        candidates = (*args, kwargs.get("input_ids"), kwargs.get("inputs_embeds"))
        inputs = next((value for value in candidates if _is_batch(value)), None)
        if inputs is None:
            return None
        cache = kwargs.get("past_key_values")
        past = cache.get_seq_length() if cache is not None else 0
        self.check(inputs.shape[0], past + inputs.shape[1])
        if not past and self.loaded.timeline is not None:
            self.loaded.timeline.restart()
        changed = kwargs
        if self.config.kv_offload and cache is None and kwargs.get("use_cache") is not False:
            changed = {**kwargs, "past_key_values": self._host_cache()}
        device = self.loaded.device
        if inputs.device != device:
            moved = {name: _to_device(value, device) for name, value in changed.items()}
            return tuple(_to_device(value, device) for value in args), moved
        return None if changed is kwargs else (args, changed)

    def _host_cache(self) -> Any:
        loaded = self.loaded
        make = cache_factory(
            self.config, loaded.model, loaded.preallocated_cache, loaded.transfers, loaded.cpu_attention
        )
        assert make is not None, "kv_offload has a cache of this package"
        return make()


def _to_device(value: Any, device: torch.device) -> Any:
    return value.to(device) if torch.is_tensor(value) and value.device != device else value


def _is_batch(value: Any) -> bool:
    return torch.is_tensor(value) and value.dim() >= 2
