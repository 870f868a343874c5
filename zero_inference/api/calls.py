"""Calls of a loaded model: what memory was planned for, and the keys and values of each generation."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from zero_inference.config.run_config import RunConfig
from zero_inference.engines.base import LoadedModel
from zero_inference.errors import UsageError
from zero_inference.kv_cache.choose import cache_factory
from zero_inference.kv_cache.device import ReusableKVCache, supports_preallocated

WITH_OWN_CACHE = ("greedy_search", "sample")  # modes of generation that only append to keys and values


@dataclass
class Calls:
    """Checks each call of a model against the plan, and gives generations their cache.

    Attributes:
        config: as it was planned; `positions` are those of a sequence.
        kept: the cache of the last generation, whose memory the next one uses.
        preallocated: whether generations have a cache that takes its memory at once.
    """

    config: RunConfig
    model_config: Any
    loaded: LoadedModel
    kept: Any = None
    kept_rows: int = field(default=0)

    def __post_init__(self) -> None:
        self.preallocated = self.loaded.preallocated_cache and supports_preallocated(self.loaded.model)

    @property
    def max_length(self) -> int:
        return self.config.positions

    def check(self, rows: int, length: int) -> None:
        """Raises UsageError where `rows` sequences of `length` tokens are more than memory was planned for."""
        planned, longest = self.config.batch_size, self.max_length
        fewer = self.config.kv_offload and rows > planned
        if length <= longest and rows * length <= planned * longest and not fewer:
            return
        batch_size = max(rows, planned) if fewer else self._batch_for(rows, length)
        raise UsageError(
            f"this call has {rows} sequence{'s' * (rows > 1)} of {length} tokens, and memory was planned for {planned} of {longest}: use "
            f"fewer or shorter ones, or load the model with batch_size={batch_size}, max_length={max(length, longest)}."
        )

    def _batch_for(self, rows: int, length: int) -> int:
        """The least batch that holds so much, of sequences of the length to ask for."""
        longest = max(length, self.max_length)
        return max(self.config.batch_size, -(-rows * length // longest))

    def longest(self, rows: int) -> int:
        """Most tokens that each of `rows` sequences may have."""
        planned = self.config.batch_size
        return self.max_length if rows <= planned else planned * self.max_length // rows

    def generation(self, model: Any, generate: Callable[..., Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The arguments of `generate` by name, with a cache and a length that memory was planned for.

        Raises:
            UsageError: more was asked for.
        """
        given = inspect.signature(generate).bind_partial(*args, **kwargs).arguments
        call = {**{name: value for name, value in given.items() if name != "kwargs"}, **given.get("kwargs", {})}
        settings = call.get("generation_config") or model.generation_config
        merged = replace_settings(settings, call)
        prompt = next(
            (call[name] for name in ("input_ids", "inputs", "inputs_embeds") if _is_batch(call.get(name))), None
        )
        rows, tokens = (1, 1) if prompt is None else prompt.shape[:2]
        rows *= max(merged.num_beams or 1, merged.num_return_sequences or 1)
        mode = str(getattr(merged.get_generation_mode(call.get("assistant_model")), "value", ""))
        appends = mode in WITH_OWN_CACHE and merged.use_cache is not False and not call.get("custom_generate")
        own = call.get("past_key_values") is not None or merged.cache_implementation is not None
        if self.config.kv_offload and not own and merged.use_cache is not False and not appends:
            raise UsageError(
                f"kv_offload=True keeps keys and values in host memory for greedy generation and sampling, not for {mode}: "
                "use one of these, or load the model without kv_offload."
            )
        self.check(rows, tokens)
        self._limit(call, merged, rows, tokens, asked=settings if call.get("generation_config") is not None else None)
        if appends and not own and (cache := self.cache(rows, merged.return_dict_in_generate is True)) is not None:
            call["past_key_values"] = cache
        return {name: to_device(value, self.loaded.device) for name, value in call.items()}

    def _limit(self, call: dict[str, Any], merged: Any, rows: int, tokens: int, asked: Any) -> None:
        """Refuse a length that was asked for and does not fit; one that only the checkpoint has ends where memory does."""
        longest = self.longest(rows)
        for name, before in (("max_new_tokens", tokens), ("max_length", 0)):
            wanted = call.get(name) if call.get(name) is not None else getattr(asked, name, None)
            if wanted is not None:
                self.check(rows, before + wanted)
                return
        for name, before in (("max_new_tokens", tokens), ("max_length", 0)):
            wanted = getattr(merged, name, None)
            if wanted is not None:
                call[name] = min(wanted, longest - before)
                return
        # neither says how long: transformers has a number of its own, which the hook before each call checks

    def cache(self, rows: int, handed_out: bool = False) -> Any:
        """Keys and values for `rows` sequences, empty; None where transformers' own are to be used.

        Args:
            handed_out: the caller gets it, so the next generation needs another one.
        """
        if handed_out:
            self.forget()
        if self.config.kv_offload:
            if self.kept is None or self.kept_rows != rows:
                self.forget()  # before more memory is taken
                self.kept, self.kept_rows = self._in_host_memory(), rows
            self.kept.reset()
        elif self.preallocated:
            if self.kept is None:
                self.kept = ReusableKVCache(self.model_config, self.config.batch_size, self.max_length)
            self.kept.begin(rows)
        found = self.kept
        if handed_out:
            self.forget()
        return found

    def forget(self) -> None:
        self.kept, self.kept_rows = None, 0

    def before(self, module: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
        """A hook before each call of the model: its size is checked, its inputs are on the device, and it has a cache where keys and values
        are to be in host memory."""
        inputs = next(
            (value for value in (*args, kwargs.get("input_ids"), kwargs.get("inputs_embeds")) if _is_batch(value)), None
        )
        if inputs is None:
            return None
        cache = kwargs.get("past_key_values")
        past = cache.get_seq_length() if cache is not None else 0
        self.check(inputs.shape[0], past + inputs.shape[1])
        if not past and self.loaded.timeline is not None:
            self.loaded.timeline.restart()
        changed = kwargs
        if self.config.kv_offload and cache is None and kwargs.get("use_cache") is not False:
            changed = {**kwargs, "past_key_values": self._in_host_memory()}
        if inputs.device != self.loaded.device:
            device = self.loaded.device
            return tuple(to_device(value, device) for value in args), {
                n: to_device(v, device) for n, v in changed.items()
            }
        return None if changed is kwargs else (args, changed)

    def _in_host_memory(self) -> Any:
        loaded = self.loaded
        make = cache_factory(
            self.config, loaded.model, loaded.preallocated_cache, loaded.transfers, loaded.cpu_attention
        )
        assert make is not None, "kv_offload has a cache of this package"
        return make()


def replace_settings(settings: Any, call: dict[str, Any]) -> Any:
    """A copy of the GenerationConfig `settings` with those of `call`."""
    import copy

    merged = copy.deepcopy(settings)
    known = {name: value for name, value in call.items() if name != "generation_config" and hasattr(merged, name)}
    for name, value in known.items():
        setattr(merged, name, value)
    return merged


def to_device(value: Any, device: torch.device) -> Any:
    return value.to(device) if torch.is_tensor(value) and value.device != device else value


def scoring_bytes(rows: int, length: int, vocabulary: int, itemsize: int, kv_bytes: int) -> int:
    """Device memory of a call that scores: the logits of all tokens in the model's dtype, two float32 copies that a log-softmax makes, and
    keys and values, which such a call keeps though nobody asks for them."""
    return rows * length * vocabulary * (itemsize + 8) + kv_bytes


def _is_batch(value: Any) -> bool:
    return torch.is_tensor(value) and value.dim() >= 2


def planned_for(config: RunConfig, max_length: int) -> RunConfig:
    """`config` with a prompt that is as long as a sequence may be: what a prefill takes grows with it. Raises UsageError."""
    if max_length < 2:
        raise UsageError(
            f"max_length={max_length}: a sequence has a prompt and a generated token at least; use 2 or more."
        )
    return replace(config, prompt_len=max_length - 1, gen_len=1).validate()
