"""Measure engine overhead: the time of engines besides the model's kernels, with a model so thin that its kernels take next to none.

`zero-inference link --save` runs it in a process of its own (hardware/measure_profile.py).
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from zero_inference.config.options import MULTI_GPU_ENGINES
from zero_inference.config.run_config import RunConfig
from zero_inference.engines.base import LoadedModel
from zero_inference.errors import RunError, UsageError
from zero_inference.hardware.profile import EngineOverhead
from zero_inference.kernels.products import FUSED_ROWS
from zero_inference.measure.loops import measure_loops
from zero_inference.measure.session import loaded_model
from zero_inference.models.spec import resolve_model
from zero_inference.planning.make_plan import plan_run
from zero_inference.planning.plan import Plan
from zero_inference.utils.environment import resident_host_bytes
from zero_inference.utils.progress import Progress
from zero_inference.utils.ranks import Ranks, detect_ranks, start_process_group, stop_process_group

# Libraries of engines; the smaller one first, since both stay in this process.
LIBRARIES = ("accelerate", "deepspeed")
LAYERS, WIDTH = 8, 256  # of the thin model
# With a GPU more tokens than the fused kernels take; without one so few that they take no longer than one.
PROMPT_TOKENS = {"cuda": 2 * FUSED_ROWS, "cpu": 4}
# Tokens of a loop: few with a GPU, for many prefills, of which the fastest counts.
TOKENS, LOOPS = {"cuda": 4, "cpu": 12}, 2
# Alternations of a model and the baseline, since the load of a shared host changes within seconds.
ALTERNATIONS = {"cuda": 4, "cpu": 1}
DTYPES = {"cuda": "bfloat16", "cpu": "float32"}
STREAMED: dict[str, Any] = {"gpu_memory": 0.0, "cpu_compute": "off", "decode_graph": "off"}
RESIDENT: dict[str, Any] = {"cpu_compute": "off", "decode_graph": "off"}  # with a GPU: all weights are resident
COPIED: dict[str, Any] = {"kv_offload": True}  # with a GPU: keys and values are copied from host memory
OFFLOADED: dict[str, Any] = {"cpu_offload": True}
# By engine and bits, whose code for fetching and dequantizing differs.
ENGINES = (
    ("stream", 16, STREAMED),
    ("stream", 4, STREAMED),
    ("stream", 4, RESIDENT),
    ("stream", 16, {"kv_offload": True, "cpu_compute": "1"}),
    ("resident", 16, COPIED),
    ("accelerate", 16, OFFLOADED),
    ("deepspeed", 16, OFFLOADED),
    ("deepspeed", 8, OFFLOADED),
    ("deepspeed", 4, OFFLOADED),
)


def print_engine_overheads() -> None:
    """Import the libraries, and print one JSON object: `library_bytes` by engine, `engine_overheads` and,
    with a GPU, `process_bytes`, with the meanings of `HardwareProfile`."""
    ranks = detect_ranks()
    on_gpu = ranks.device.type == "cuda"
    os.environ |= {"DS_ACCELERATOR": ranks.device.type, "DS_SKIP_CUDA_CHECK": "1"}
    from transformers import LlamaForCausalLM  # noqa: F401

    start_process_group(ranks)  # like transformers part of every run's process
    before = resident_host_bytes()
    library_bytes = {name: added for name in LIBRARIES if (added := _import(name)) is not None}
    if on_gpu and "deepspeed" in library_bytes:
        from zero_inference.engines.deepspeed.engine import compile_dequantization

        with contextlib.suppress(Exception):  # it is reported when float16 is measured
            compile_dequantization(ranks, lambda line: print(line, flush=True))
    all_libraries_bytes = resident_host_bytes() - before
    overheads: list[EngineOverhead] = []
    result: dict[str, Any] = {"library_bytes": library_bytes, "engine_overheads": []}
    with tempfile.TemporaryDirectory(prefix="zero-inference-thin-") as folder, contextlib.ExitStack() as stack:
        _write_thin_model(Path(folder))
        if baseline := _load_or_print("resident", 16, {}, folder, ranks, stack):
            overheads.append(baseline.overhead_over(baseline))
            if on_gpu:  # without a GPU a run's own memory outweighs libraries
                result["process_bytes"] = resident_host_bytes() - all_libraries_bytes
            for engine, bits, options in ENGINES:
                absent = engine in LIBRARIES and engine not in library_bytes
                if absent or (options in (RESIDENT, COPIED) and not on_gpu):
                    continue
                with contextlib.ExitStack() as engine_stack:
                    if thin := _load_or_print(engine, bits, options, folder, ranks, engine_stack):
                        overheads.append(thin.overhead_over(baseline))
    stop_process_group()
    for each in overheads:
        # DeepSpeed's first loading in a process took 2.4 s on an H200's host, the second 0.2 s, as in runs
        shortest_s = min(other.load_layer_s for other in overheads if other.engine == each.engine)
        each = each.model_copy(update={"load_layer_s": shortest_s})
        result["engine_overheads"].append(each.model_dump(by_alias=True))
    print(json.dumps(result))


@dataclass(frozen=True)
class _ThinModel:
    """The thin model, loaded by an engine."""

    plan: Plan
    loaded: LoadedModel
    load_s: float
    units: int  # divisor of a step's overhead: layers whose KV cache is copied, else quantized resident blocks, else copies of weights
    resident: bool  # quantized weights stay on the device
    launches: int  # kernels of a step; a prefill has about as many
    dequantized_weights: int  # weights that a prefill dequantizes, with a kernel each

    def overhead_over(self, baseline: _ThinModel) -> EngineOverhead:
        """Return the seconds that this takes longer than `baseline`, which fetches nothing and was loaded first. The two alternate, and
        the fastest loops count: other work of the host is not the engine's."""
        own, base = [], []
        for alternation in range(ALTERNATIONS[self.loaded.device.type]):
            own.append(self.fastest_s(warmup=int(alternation == 0)))
            base.append(own[-1] if self is baseline else baseline.fastest_s(warmup=int(alternation == 0)))
        prefill_s, step_s = map(min, zip(*own))
        base_prefill_s, base_step_s = map(min, zip(*base))
        dequantize_s = self.dequantized_weights * base_step_s / baseline.launches
        config = self.plan.job.config
        return EngineOverhead(
            engine=config.engine,
            quant_bits=self.plan.job.quant_bits,
            kv_offload=config.kv_offload,
            resident=self.resident,
            load_s=baseline.load_s,
            load_layer_s=0.0 if self is baseline else self.load_s / LAYERS,
            start_s=max(0.0, base_prefill_s - base_step_s),
            step_piece_s=max(0.0, step_s - base_step_s) / max(1, self.units),
            prefill_piece_s=max(0.0, prefill_s - base_prefill_s - dequantize_s) / max(1, self.units),
            dequantized_gb_per_s=self.plan.engine_plan.measure_dequantized_gb_per_s(self.plan.job.spec.dtype),
            dequantized_float16_gb_per_s=self._measure_float16_dequantization(),
        )

    def _measure_float16_dequantization(self) -> float | None:
        """Return the GB/s at which the engine dequantizes to float16 on a GPU, where the thin model is bfloat16; None on a CPU, and, with
        a message on stderr, if the engine's kernel cannot be compiled."""
        try:
            return self.plan.engine_plan.measure_dequantized_gb_per_s(torch.float16) if self.plan.job.on_gpu else None
        except Exception as error:  # also of compilers
            config = self.plan.job.config
            print(f"{config.engine}, {self.plan.job.quant_bits} bits, float16: {error}", file=sys.stderr)
            return None

    def fastest_s(self, warmup: int) -> tuple[float, float]:
        """Return the shortest prefill and the shortest decode step of a few generations of a batch of 1, after `warmup` others."""
        job, loaded = self.plan.job, self.loaded
        ids = torch.zeros(1, job.config.prompt_len, dtype=torch.int64)
        make_cache = loaded.cache_factory(job.config)
        loops = measure_loops(loaded, ids, TOKENS[loaded.device.type], LOOPS, warmup, job.ranks, make_cache).loops
        return min(loop.prefill_s for loop in loops), min(step for loop in loops for step in loop.step_s)


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
    engine: str, bits: int, options: dict[str, Any], model: str, ranks: Ranks, stack: contextlib.ExitStack
) -> _ThinModel | None:
    """Load the thin model until `stack` closes; if the engine does not run here, print why to stderr and return None."""
    kind = ranks.device.type
    settings: dict[str, Any] = {
        "model": model,
        "engine": engine,
        "dummy": True,
        "dtype": DTYPES[kind],
        "quant_bits": bits,
        "prompt_len": PROMPT_TOKENS[kind],
        "gen_len": TOKENS[kind],
        "verbose": 0,
    }
    if engine in MULTI_GPU_ENGINES:
        settings["num_gpus"] = 1
    if kind == "cuda" and options.get("kv_offload"):
        settings |= {"pin_kv_cache": True, "async_kv_offload": True}
    try:
        config = RunConfig(**settings, **options).validate()
        plan = plan_run(config, resolve_model(config, kind), ranks)
        job, terms = plan.job, plan.engine_plan.cost_terms
        step = job.empty_model.traced_pass(job.spec, 1, job.config.prompt_len)  # while the model is empty
        assert step is not None, "a Llama runs on the meta device"
        dequantizes = job.quantized and 0 < terms.fused_rows < job.config.prompt_len
        loaded, load_s, _ = stack.enter_context(loaded_model(plan, Progress(enabled=False), compared=False))
    except (UsageError, RunError, RuntimeError) as error:
        print(f"{engine}, {bits} bits: {error}", file=sys.stderr)
        return None
    return _ThinModel(
        plan,
        loaded,
        load_s,
        units=LAYERS if job.config.kv_offload else terms.resident_quantized_blocks or terms.fetches,
        resident=terms.resident_quantized_blocks > 0,
        launches=step.launches,
        dequantized_weights=step.products_in_layers if dequantizes else 0,
    )
