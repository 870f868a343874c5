"""What engines take besides the model's work, found with a model so thin that nothing else counts.

`zero-inference link --save` runs it in a process of its own: an engine's library stays in the process that has imported it.
"""

from __future__ import annotations

import importlib
import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from zero_inference.config import RunConfig
from zero_inference.engines.base import LoadedModel
from zero_inference.errors import RunError, UsageError
from zero_inference.kv_cache.choose import cache_maker
from zero_inference.link.description import OwnWork
from zero_inference.measure import generation
from zero_inference.measure.session import loaded_model
from zero_inference.models.spec import resolve_model
from zero_inference.plan.plan import Plan, plan_run
from zero_inference.quantization.products import FUSED_ROWS
from zero_inference.records.loops import Loop
from zero_inference.runtime.distributed import Ranks, detect_ranks, start_process_group, stop_process_group
from zero_inference.runtime.environment import resident_host_bytes
from zero_inference.runtime.progress import Progress

# Of engines of the same name; the smaller one first, for both are in this process then.
LIBRARIES = ("accelerate", "deepspeed")
LAYERS, WIDTH = 8, 256
# More of the prompt than the device multiplies with codes as they are; without a GPU so few that they take no longer than one.
PROMPT_TOKENS = {"cuda": 2 * FUSED_ROWS, "cpu": 4}
TOKENS, LOOPS, WARMUP = 12, 4, 2
# By engine and bits of the weights: what it fetches, and restores, is different code.
LAUNCHED: dict[str, object] = {"gpu_memory": 0.0, "cpu_compute": "off", "decode_graph": "off"}
OFFLOADED: dict[str, object] = {"cpu_offload": True}
ENGINES = (
    ("stream", 16, LAUNCHED),
    ("stream", 4, LAUNCHED),
    ("stream", 16, {"kv_offload": True, "cpu_compute": "1"}),
    ("accelerate", 16, OFFLOADED),
    ("deepspeed", 16, OFFLOADED),
    ("deepspeed", 8, OFFLOADED),
    ("deepspeed", 4, OFFLOADED),
)


def print_own_work() -> None:
    """Prints one JSON object: `library_bytes` by engine, `own_work` as `Description` has it."""
    library_bytes = {name: added for name in LIBRARIES if (added := _import(name)) is not None}
    ranks = detect_ranks()
    found: list[OwnWork] = []
    start_process_group(ranks)  # DeepSpeed wants one
    with tempfile.TemporaryDirectory(prefix="zero-inference-thin-") as folder:
        _write_thin_model(Path(folder))
        plain = _measured("resident", 16, {}, folder, ranks)
        if plain is not None:
            found.append(plain.than(plain))
            for engine, bits, options in ENGINES:
                if engine not in LIBRARIES or engine in library_bytes:
                    measured = _measured(engine, bits, options, folder, ranks)
                    found += [] if measured is None else [measured.than(plain)]
    stop_process_group()
    print(json.dumps({"library_bytes": library_bytes, "own_work": [each.model_dump(by_alias=True) for each in found]}))


@dataclass(frozen=True)
class _Thin:
    """The thin model run by an engine.

    Attributes:
        launches: kernels of a step; a prefill has about as many.
        restored: weights that are restored from codes in a prefill, by a kernel each.
        prefill_s, step_s: the fastest: what else the host does is not the engine's.
    """

    engine: str
    quant_bits: int
    kv_offload: bool
    pieces: int
    launches: int
    restored: int
    load_s: float
    prefill_s: float
    step_s: float
    restored_gb_per_s: float | None

    def than(self, plain: _Thin) -> OwnWork:
        """What it takes more than `plain`, which fetches nothing, and was loaded first: kernels, too."""
        restored_s = self.restored * plain.step_s / plain.launches
        return OwnWork(
            engine=self.engine,
            quant_bits=self.quant_bits,
            kv_offload=self.kv_offload,
            load_s=plain.load_s + (0.0 if self is plain else self.load_s),
            start_s=max(0.0, plain.prefill_s - plain.step_s),
            step_piece_s=max(0.0, self.step_s - plain.step_s) / max(1, self.pieces),
            prefill_piece_s=max(0.0, self.prefill_s - plain.prefill_s - restored_s) / max(1, self.pieces),
            restored_gb_per_s=self.restored_gb_per_s,
        )


def _import(library: str) -> int | None:
    """Bytes that importing it adds to a process that has the others; None where it is not there."""
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


def _measured(engine: str, bits: int, options: dict[str, object], model: str, ranks: Ranks) -> _Thin | None:
    """None where the engine does not run here, which is told."""
    on_gpu = ranks.device.type == "cuda"
    asked = {
        "model": model,
        "engine": engine,
        "dummy": True,
        "dtype": "bfloat16" if on_gpu else "float32",
        "quant_bits": bits,
        "prompt_len": PROMPT_TOKENS[ranks.device.type],
        "gen_len": TOKENS,
        "verbose": 0,
    }
    if on_gpu and options.get("kv_offload"):
        asked |= {"pin_kv_cache": True, "async_kv_offload": True}
    try:
        config = RunConfig(**asked, **options).validate()  # type: ignore[arg-type]
        plan = plan_run(config, resolve_model(config, ranks.device.type), ranks)
        counted = _counts(plan)
        with loaded_model(plan, Progress(enabled=False)) as (loaded, load_s):
            found = _loops(plan, loaded)
            return _Thin(
                engine=engine,
                quant_bits=bits,
                kv_offload=config.kv_offload,
                **counted,
                load_s=load_s,
                prefill_s=min(loop.prefill_s for loop in found),
                step_s=min(step for loop in found for step in loop.step_s),
                restored_gb_per_s=plan.weights.measure_restored_gb_per_s(),
            )
    except (UsageError, RunError, RuntimeError) as error:
        print(f"{engine}, {bits} bits: {error}", file=sys.stderr)
        return None


def _counts(plan: Plan) -> dict[str, int]:
    """Pieces (layers, where keys and values are in host memory), launches and restored weights, as `_Thin` has them; to be asked for while
    the model is empty."""
    job, weights = plan.job, plan.weights
    step = job.skeleton.traced_pass(job.spec, 1, job.config.prompt_len)
    assert step is not None, "a Llama runs on the meta device"
    restores = job.config.quantized and 0 < weights.fused_rows < job.config.prompt_len
    return {
        "pieces": LAYERS if job.config.kv_offload else weights.pieces,
        "launches": step.launches,
        "restored": step.products_in_layers if restores else 0,
    }


def _loops(plan: Plan, loaded: LoadedModel) -> list[Loop]:
    job, config = plan.job, plan.job.config
    ids = torch.zeros(1, config.prompt_len, dtype=torch.int64)
    make_cache = cache_maker(config, job.spec.config, loaded.preallocated_cache, loaded.transfers, loaded.meeting)
    return generation.measure(loaded, ids, TOKENS, LOOPS, WARMUP, job.ranks, make_cache).loops
