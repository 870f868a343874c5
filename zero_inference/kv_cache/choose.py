"""The choice of a run's KV cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from zero_inference.config.run_config import RunConfig
from zero_inference.kv_cache.cpu_attention import CpuAttention, CpuAttentionCache
from zero_inference.kv_cache.device import DeviceKVCache, PreallocatedCache, supports_preallocated
from zero_inference.kv_cache.host import HostKVCache
from zero_inference.models.sizes import cache_class
from zero_inference.utils.transfers import Transfers


def cache_factory(
    config: RunConfig, model: Any, preallocated: bool, transfers: Transfers, cpu_attention: CpuAttention | None = None
) -> Callable[[], PreallocatedCache] | None:
    """Return a function that gives each loop its cache, empty and in the same memory; None leaves the cache to transformers.

    Args:
        preallocated: whether the engine needs a cache that allocates nothing while the model runs.
        cpu_attention: computes attention over a cache in host memory; None where the device does.
    """
    length, model_config = config.positions, model.config
    on_host = model_config, length, config.pin_kv_cache, config.async_kv_offload, transfers
    cache: PreallocatedCache
    if config.kv_offload and cpu_attention is not None:
        cache = CpuAttentionCache(*on_host, cpu_attention, cache_class(model))
    elif config.kv_offload:
        cache = HostKVCache(*on_host, cache_class(model))
    elif preallocated and supports_preallocated(model):
        cache = DeviceKVCache(model_config, length)
    else:
        return None

    def make() -> PreallocatedCache:
        cache.reset()
        return cache

    return make
