"""Measure engine overhead: the time of engines besides the model's kernels, with a model so thin that its kernels take next to none.

`zero-inference link --save` runs it in a process of its own (hardware/overhead_process.py).
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import tempfile
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from zero_inference.config.run_config import RunConfig
from zero_inference.engines.base import LoadedModel
from zero_inference.errors import RunError, UsageError
from zero_inference.hardware.overhead_process import signal_ready
from zero_inference.hardware.profile import EngineOverhead
from zero_inference.kernels.products import FUSED_ROWS
from zero_inference.kv_cache.choose import cache_factory
from zero_inference.measure.loops import measure_loops
from zero_inference.measure.session import loaded_model
from zero_inference.models.spec import resolve_model
from zero_inference.planning.plan import Plan, plan_run
from zero_inference.records.schema import Loop
from zero_inference.utils.environment import resident_host_bytes
from zero_inference.utils.progress import Progress
from zero_inference.utils.ranks import Ranks, detect_ranks, start_process_group, stop_process_group

# Libraries of engines; the smaller one first, since both stay in this process.
LIBRARIES = ("accelerate", "deepspeed")
LAYERS, WIDTH = 8, 256
# With a GPU more tokens than the fused kernels take; without one so few that they take no longer than one.
PROMPT_TOKENS = {"cuda": 2 * FUSED_ROWS, "cpu": 4}
# Tokens of a loop: few with a GPU, for many prefills, of which the fastest counts.
TOKENS, WARMUP = {"cuda": 4, "cpu": 12}, 1
# Alternations of a model and the baseline, since the load of a shared host changes within seconds.
ALTERNATIONS, LOOPS = {"cuda": 4, "cpu": 1}, {"cuda": 2, "cpu": 2}
DTYPES = {"cuda": torch.bfloat16, "cpu": torch.float32}
# By engine and bits, whose code for fetching and dequantizing differs.
LAUNCHED: dict[str, object] = {"gpu_memory": 0.0, "cpu_compute": "off", "decode_graph": "off"}
RESIDENT: dict[str, object] = {"cpu_compute": "off", "decode_graph": "off"}  # with a GPU: all weights are resident
COPIED: dict[str, object] = {"kv_offload": True}  # with a GPU: keys and values are copied from host memory
OFFLOADED: dict[str, object] = {"cpu_offload": True}
ENGINES = (
    ("stream", 16, LAUNCHED),
    ("stream", 4, LAUNCHED),
    ("stream", 4, RESIDENT),
    ("stream", 16, {"kv_offload": True, "cpu_compute": "1"}),
    ("resident", 16, COPIED),
    ("accelerate", 16, OFFLOADED),
    ("deepspeed", 16, OFFLOADED),
    ("deepspeed", 8, OFFLOADED),
    ("deepspeed", 4, OFFLOADED),
)


def print_engine_overheads() -> None:
    """Import the libraries, wait for the parent's signal, and print one JSON object: `library_bytes` by engine, `engine_overheads` and,
    with a GPU, `process_bytes`, with the meanings of `HardwareProfile`."""
    ranks = detect_ranks()
    os.environ |= {"DS_ACCELERATOR": ranks.device.type, "DS_SKIP_CUDA_CHECK": "1"}
    from transformers import LlamaForCausalLM  # noqa: F401

    start_process_group(ranks)  # like transformers part of every run's process
    before = resident_host_bytes()
    library_bytes = {name: added for name in LIBRARIES if (added := _import(name)) is not None}
    if ranks.device.type == "cuda" and "deepspeed" in library_bytes:
        from zero_inference.engines.deepspeed.engine import compile_dequantization

        with contextlib.suppress(Exception):  # it is reported when float16 is measured
            compile_dequantization(ranks, lambda line: print(line, flush=True))
    all_libraries_bytes = resident_host_bytes() - before
    if not signal_ready():
        return
    with tempfile.TemporaryDirectory(prefix="zero-inference-thin-") as folder:
        _write_thin_model(Path(folder))
        overheads, process_bytes = _measure_overheads(folder, ranks, library_bytes)
    stop_process_group()
    dumped = [each.model_dump(by_alias=True) for each in _with_shortest_loading(overheads)]
    result: dict[str, Any] = {"library_bytes": library_bytes, "engine_overheads": dumped}
    if ranks.device.type == "cuda" and process_bytes:  # without a GPU a run's own memory outweighs libraries
        result["process_bytes"] = process_bytes - all_libraries_bytes
    print(json.dumps(result))


def _measure_overheads(model: str, ranks: Ranks, libraries: Collection[str]) -> tuple[list[EngineOverhead], int]:
    """Return the overhead of each engine that runs here, and the bytes of this process after the baseline has generated.

    Args:
        model: folder of the thin model.
        libraries: those of `LIBRARIES` that could be imported; engines without theirs are left out.
    """
    with contextlib.ExitStack() as stack:
        if (baseline := _load_or_print("resident", 16, {}, model, ranks, stack)) is None:
            return [], 0
        overheads, process_bytes = [baseline.overhead_over(baseline)], resident_host_bytes()
        for engine, bits, options in ENGINES:
            absent = engine in LIBRARIES and engine not in libraries
            if absent or (options in (RESIDENT, COPIED) and not baseline.on_gpu):
                continue
            with contextlib.ExitStack() as engine_stack:
                if loaded := _load_or_print(engine, bits, options, model, ranks, engine_stack):
                    overheads.append(loaded.overhead_over(baseline))
    return overheads, process_bytes


def _with_shortest_loading(overheads: Sequence[EngineOverhead]) -> list[EngineOverhead]:
    """Return `overheads` with the shortest loading of each engine: DeepSpeed's first one in this process took 2.4 s on an H200's host,
    the second 0.2 s, as in runs."""
    shortest_s = {
        engine: min(each.load_layer_s for each in overheads if each.engine == engine)
        for engine in {each.engine for each in overheads}
    }
    return [each.model_copy(update={"load_layer_s": shortest_s[each.engine]}) for each in overheads]


@dataclass(frozen=True)
class _ThinModel:
    """The thin model, loaded by an engine.

    Attributes:
        units: what the overhead of a step is divided by: layers if the KV cache is in host memory, else blocks.
        resident: quantized weights stay on the device.
        launches: kernels of a step; a prefill has about as many.
        dequantized_weights: weights that a prefill dequantizes, with a kernel each.
    """

    plan: Plan
    loaded: LoadedModel
    load_s: float
    units: int
    resident: bool
    launches: int
    dequantized_weights: int

    @property
    def on_gpu(self) -> bool:
        return self.plan.job.on_gpu

    def overhead_over(self, baseline: _ThinModel) -> EngineOverhead:
        """Return the seconds that this takes longer than `baseline`, which fetches nothing and was loaded first. The two alternate, and
        the fastest loops count: other work of the host is not the engine's."""
        own = _Fastest()
        base = own if self is baseline else _Fastest()
        for alternation in range(ALTERNATIONS[self.loaded.device.type]):
            for model, fastest in ((self, own), (baseline, base))[: 1 if self is baseline else 2]:
                fastest.add(model.loops(WARMUP if alternation == 0 else 0))
        dequantize_s = self.dequantized_weights * base.step_s / baseline.launches
        return EngineOverhead(
            engine=self.plan.job.config.engine,
            quant_bits=self.plan.job.config.quant_bits,
            kv_offload=self.plan.job.config.kv_offload,
            resident=self.resident,
            load_s=baseline.load_s,
            load_layer_s=0.0 if self is baseline else self.load_s / LAYERS,
            start_s=max(0.0, base.prefill_s - base.step_s),
            step_piece_s=max(0.0, own.step_s - base.step_s) / max(1, self.units),
            prefill_piece_s=max(0.0, own.prefill_s - base.prefill_s - dequantize_s) / max(1, self.units),
            restored_gb_per_s=self.plan.weights.measure_dequantized_gb_per_s(self.plan.job.spec.dtype),
            restored_float16_gb_per_s=self._measure_float16_dequantization(),
        )

    def _measure_float16_dequantization(self) -> float | None:
        """Return the GB/s at which the engine dequantizes to float16 on a GPU, where the thin model is bfloat16; None on a CPU, and, with
        a message on stderr, if the engine's kernel cannot be compiled."""
        if not self.on_gpu:
            return None
        config = self.plan.job.config
        try:
            return self.plan.weights.measure_dequantized_gb_per_s(torch.float16)
        except Exception as error:  # also of compilers
            print(f"{config.engine}, {config.quant_bits} bits, float16: {error}", file=sys.stderr)
            return None

    def loops(self, warmup: int) -> list[Loop]:
        """Return measured generations of a batch of 1, after `warmup` that are not."""
        job, loaded, kind = self.plan.job, self.loaded, self.loaded.device.type
        ids = torch.zeros(1, job.config.prompt_len, dtype=torch.int64)
        make_cache = cache_factory(
            job.config, loaded.model, loaded.preallocated_cache, loaded.transfers, loaded.cpu_attention
        )
        return measure_loops(loaded, ids, TOKENS[kind], LOOPS[kind], warmup, job.ranks, make_cache).loops


@dataclass
class _Fastest:
    """The shortest prefill and the shortest decode step of the loops added."""

    prefill_s: float = float("inf")
    step_s: float = float("inf")

    def add(self, loops: Sequence[Loop]) -> None:
        self.prefill_s = min(self.prefill_s, *(loop.prefill_s for loop in loops))
        self.step_s = min(self.step_s, *(step for loop in loops for step in loop.step_s))


def _import(library: str) -> int | None:
    """Return the bytes that importing `library` adds to this process; None, with a message on stderr, if that fails."""
    before = resident_host_bytes()
    try:
        importlib.import_module(library)
    except Exception as error:
        print(f"{library}: {error}", file=sys.stderr)
        return None
    return max(0, resident_host_bytes() - before)


def _write_thin_model(folder: Path) -> None:
    from transformers import LlamaConfig

    LlamaConfig(
        architectures=["LlamaForCausalLM"],
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_attention_heads=4,
        num_key_value_heads=4,
        num_hidden_layers=LAYERS,
        vocab_size=WIDTH,
        max_position_embeddings=128,
        bos_token_id=0,
        eos_token_id=None,
    ).save_pretrained(folder)


def _load_or_print(
    engine: str, bits: int, options: dict[str, object], model: str, ranks: Ranks, stack: contextlib.ExitStack
) -> _ThinModel | None:
    """Load the thin model until `stack` closes; if the engine does not run here, print why to stderr and return None."""
    try:
        return _load(engine, bits, options, model, ranks, stack)
    except (UsageError, RunError, RuntimeError) as error:
        print(f"{engine}, {bits} bits: {error}", file=sys.stderr)
        return None


def _load(
    engine: str, bits: int, options: dict[str, object], model: str, ranks: Ranks, stack: contextlib.ExitStack
) -> _ThinModel:
    defaults = {
        "model": model,
        "engine": engine,
        "dummy": True,
        "dtype": str(DTYPES[ranks.device.type]).removeprefix("torch."),
        "quant_bits": bits,
        "prompt_len": PROMPT_TOKENS[ranks.device.type],
        "gen_len": TOKENS[ranks.device.type],
        "verbose": 0,
    }
    if ranks.device.type == "cuda" and options.get("kv_offload"):
        defaults |= {"pin_kv_cache": True, "async_kv_offload": True}
    config = RunConfig(**defaults, **options).validate()  # type: ignore[arg-type]
    plan = plan_run(config, resolve_model(config, ranks.device.type), ranks)
    job, terms = plan.job, plan.weights.cost_terms
    step = job.empty_model.traced_pass(job.spec, 1, job.config.prompt_len)  # while the model is empty
    assert step is not None, "a Llama runs on the meta device"
    dequantizes = job.config.quantized and 0 < terms.fused_rows < job.config.prompt_len
    loaded, load_s, _ = stack.enter_context(loaded_model(plan, Progress(enabled=False), compared=False))
    return _ThinModel(
        plan,
        loaded,
        load_s,
        units=LAYERS if job.config.kv_offload else terms.resident_quantized_blocks or terms.fetches,
        resident=terms.resident_quantized_blocks > 0,
        launches=step.launches,
        dequantized_weights=step.products_in_layers if dequantizes else 0,
    )
