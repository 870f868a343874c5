"""Measure engine overhead: what engines take besides the model's work, with a model so thin that nothing else counts.

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
# Alternations of a model and the plain one, since a shared host changes within seconds.
TURNS, LOOPS = {"cuda": 4, "cpu": 1}, {"cuda": 2, "cpu": 2}
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
    """Load the libraries, wait for the go, and print one JSON object: `library_bytes` by engine, `engine_overheads` and, with a GPU,
    `process_bytes` as `HardwareProfile` has them."""
    ranks = detect_ranks()
    os.environ |= {"DS_ACCELERATOR": ranks.device.type, "DS_SKIP_CUDA_CHECK": "1"}
    from transformers import LlamaForCausalLM  # noqa: F401

    start_process_group(ranks)  # like transformers part of every run's process
    before = resident_host_bytes()
    library_bytes = {name: added for name in LIBRARIES if (added := _import(name)) is not None}
    if ranks.device.type == "cuda" and "deepspeed" in library_bytes:
        _compile(ranks)
    of_libraries = resident_host_bytes() - before
    if not signal_ready():
        return
    with tempfile.TemporaryDirectory(prefix="zero-inference-thin-") as folder:
        _write_thin_model(Path(folder))
        found, process_bytes = _own_work(folder, ranks, library_bytes)
    stop_process_group()
    dumped = [each.model_dump(by_alias=True) for each in _loaded_alike(found)]
    result: dict[str, Any] = {"library_bytes": library_bytes, "engine_overheads": dumped}
    if ranks.device.type == "cuda" and process_bytes:  # without a GPU a run's own memory outweighs libraries
        result["process_bytes"] = process_bytes - of_libraries
    print(json.dumps(result))


def _own_work(model: str, ranks: Ranks, libraries: Collection[str]) -> tuple[list[EngineOverhead], int]:
    """Return the overhead of each engine that runs here, and the bytes of this process after the first one has generated.

    Engines of `LIBRARIES` run only if they are in `libraries`.
    """
    with contextlib.ExitStack() as stack:
        if (plain := _loaded("resident", 16, {}, model, ranks, stack)) is None:
            return [], 0
        found, process_bytes = [plain.overhead_over(plain)], resident_host_bytes()
        for engine, bits, options in ENGINES:
            absent = engine in LIBRARIES and engine not in libraries
            if absent or (options in (RESIDENT, COPIED) and not plain.on_gpu):
                continue
            with contextlib.ExitStack() as own_stack:
                beside = _loaded(engine, bits, options, model, ranks, own_stack)
                found += [] if beside is None else [beside.overhead_over(plain)]
    return found, process_bytes


def _loaded_alike(found: Sequence[EngineOverhead]) -> list[EngineOverhead]:
    """Return `found` with the shortest loading of each engine: DeepSpeed's first one in this process took 2.4 s on an H200's host, the
    second 0.2 s, as in runs."""
    least: dict[str, float] = {}
    for each in found:
        least[each.engine] = min(each.load_layer_s, least.get(each.engine, each.load_layer_s))
    return [each.model_copy(update={"load_layer_s": least[each.engine]}) for each in found]


@dataclass(frozen=True)
class _Thin:
    """The thin model, loaded by an engine.

    Attributes:
        pieces: layers with keys and values in host memory, else blocks.
        resident: quantized weights stay on the device.
        launches: kernels of a step; a prefill has about as many.
        restored: weights that a prefill dequantizes, a kernel each.
    """

    plan: Plan
    loaded: LoadedModel
    load_s: float
    pieces: int
    resident: bool
    launches: int
    restored: int

    @property
    def on_gpu(self) -> bool:
        return self.plan.job.on_gpu

    def overhead_over(self, plain: _Thin) -> EngineOverhead:
        """Return what this takes more than `plain`, which fetches nothing and was loaded first. The two alternate, and the fastest loops
        count: other work of the host is not the engine's."""
        own, others = _Fastest(), _Fastest()
        for turn in range(TURNS[self.loaded.device.type]):
            for model, fastest in ((self, own), (plain, others))[: 1 if self is plain else 2]:
                fastest.add(model.loops(WARMUP if turn == 0 else 0))
        if self is plain:
            others = own
        restored_s = self.restored * others.step_s / plain.launches
        return EngineOverhead(
            engine=self.plan.job.config.engine,
            quant_bits=self.plan.job.config.quant_bits,
            kv_offload=self.plan.job.config.kv_offload,
            resident=self.resident,
            load_s=plain.load_s,
            load_layer_s=0.0 if self is plain else self.load_s / LAYERS,
            start_s=max(0.0, others.prefill_s - others.step_s),
            step_piece_s=max(0.0, own.step_s - others.step_s) / max(1, self.pieces),
            prefill_piece_s=max(0.0, own.prefill_s - others.prefill_s - restored_s) / max(1, self.pieces),
            restored_gb_per_s=self.plan.weights.measure_dequantized_gb_per_s(self.plan.job.spec.dtype),
            restored_float16_gb_per_s=self._restored_float16_gb_per_s(),
        )

    def _restored_float16_gb_per_s(self) -> float | None:
        """Measure float16 on a GPU, where the thin model is bfloat16; None if the engine's kernel cannot be compiled, which is printed."""
        if not self.on_gpu:
            return None
        config = self.plan.job.config
        try:
            return self.plan.weights.measure_dequantized_gb_per_s(torch.float16)
        except Exception as error:  # also of compilers
            print(f"{config.engine}, {config.quant_bits} bits, float16: {error}", file=sys.stderr)
            return None

    def loops(self, warmup: int) -> list[Loop]:
        job, loaded, kind = self.plan.job, self.loaded, self.loaded.device.type
        ids = torch.zeros(1, job.config.prompt_len, dtype=torch.int64)
        make_cache = cache_factory(
            job.config, loaded.model, loaded.preallocated_cache, loaded.transfers, loaded.cpu_attention
        )
        return measure_loops(loaded, ids, TOKENS[kind], LOOPS[kind], warmup, job.ranks, make_cache).loops


@dataclass
class _Fastest:
    prefill_s: float = float("inf")
    step_s: float = float("inf")

    def add(self, loops: Sequence[Loop]) -> None:
        self.prefill_s = min(self.prefill_s, *(loop.prefill_s for loop in loops))
        self.step_s = min(self.step_s, *(step for loop in loops for step in loop.step_s))


def _import(library: str) -> int | None:
    """Return the bytes that importing it adds to this process; None if that fails, which is printed."""
    before = resident_host_bytes()
    try:
        importlib.import_module(library)
    except Exception as error:
        print(f"{library}: {error}", file=sys.stderr)
        return None
    return max(0, resident_host_bytes() - before)


def _compile(ranks: Ranks) -> None:
    """Compile DeepSpeed's float16 dequantization. A failure is reported when it is measured."""
    from zero_inference.engines.deepspeed.engine import compile_dequantization

    with contextlib.suppress(Exception):
        compile_dequantization(ranks, lambda line: print(line, flush=True))


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


def _loaded(
    engine: str, bits: int, options: dict[str, object], model: str, ranks: Ranks, stack: contextlib.ExitStack
) -> _Thin | None:
    """Load as `_entered` does; None if the engine does not run here, which is printed."""
    try:
        return _entered(engine, bits, options, model, ranks, stack)
    except (UsageError, RunError, RuntimeError) as error:
        print(f"{engine}, {bits} bits: {error}", file=sys.stderr)
        return None


def _entered(
    engine: str, bits: int, options: dict[str, object], model: str, ranks: Ranks, stack: contextlib.ExitStack
) -> _Thin:
    """Load the thin model until `stack` closes. Raises UsageError, RunError or RuntimeError: the engine does not run here."""
    on_gpu = ranks.device.type == "cuda"
    asked = {
        "model": model,
        "engine": engine,
        "dummy": True,
        "dtype": str(DTYPES[ranks.device.type]).removeprefix("torch."),
        "quant_bits": bits,
        "prompt_len": PROMPT_TOKENS[ranks.device.type],
        "gen_len": TOKENS[ranks.device.type],
        "verbose": 0,
    }
    if on_gpu and options.get("kv_offload"):
        asked |= {"pin_kv_cache": True, "async_kv_offload": True}
    config = RunConfig(**asked, **options).validate()  # type: ignore[arg-type]
    plan = plan_run(config, resolve_model(config, ranks.device.type), ranks)
    counted = _counts(plan)  # while the model is empty
    loaded, load_s, _ = stack.enter_context(loaded_model(plan, Progress(enabled=False), compared=False))
    return _Thin(plan, loaded, load_s, **counted)


def _counts(plan: Plan) -> dict[str, Any]:
    """Return the counts of `_Thin`."""
    job, terms = plan.job, plan.weights.cost_terms
    step = job.empty_model.traced_pass(job.spec, 1, job.config.prompt_len)
    assert step is not None, "a Llama runs on the meta device"
    restores = job.config.quantized and 0 < terms.fused_rows < job.config.prompt_len
    return {
        "pieces": LAYERS if job.config.kv_offload else terms.resident_quantized_blocks or terms.fetches,
        "resident": terms.resident_quantized_blocks > 0,
        "launches": step.launches,
        "restored": step.products_in_layers if restores else 0,
    }
