"""The cases of same_results.py, and the small files that they read."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

SHORT = "--prompt-len 12 --gen-len 5 --batch-size 2 --loops 1 --warmup 0 --log-dir logs"
LLAMA, OPT, MIXTRAL = (f"--model inputs/{family}" for family in ("llama", "opt", "mixtral"))
FLOAT32, BFLOAT16 = "--dtype float32", "--dtype bfloat16"
STREAM, DEEPSPEED = "--engine stream", "--engine deepspeed"
ACCELERATE, RESIDENT = "--engine accelerate", "--engine resident"
CPU, DISK = "--cpu-offload", "--disk-offload --offload-dir offload"
DRY = "--dummy --dry-run"

SIZES = dict(hidden_size=64, num_hidden_layers=3, max_position_embeddings=128)
FAMILIES = {
    "llama": dict(intermediate_size=192, num_attention_heads=8, num_key_value_heads=2, tie_word_embeddings=False),
    "opt": dict(ffn_dim=256, num_attention_heads=4, word_embed_proj_dim=64, do_layer_norm_before=True),
    "mixtral": dict(
        intermediate_size=128,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        tie_word_embeddings=False,
    ),
}
QUESTIONS = (
    {"prompt": "What is the capital of Spain?", "choices": ["Paris", "Madrid", "Rome", "Oslo"], "answer": 1},
    {"prompt": "How many legs has a spider?", "choices": ["2", "4", "6", "8"], "answer": 3},
)


@dataclass(frozen=True)
class Case:
    """One command. `launcher` is "" (python), torchrun, deepspeed or module (python -m zero_inference).

    `bare` leaves SHORT out.
    """

    name: str
    options: str
    launcher: str = ""
    ranks: int = 1
    bare: bool = False


def _ranks(name: str, launcher: str, ranks: int, *options: str) -> Case:
    return Case(f"{name}-{launcher}{ranks}", " ".join(options), launcher, ranks)


def _one(name: str, *options: str) -> Case:
    return Case(name, " ".join(options))


def _bare(name: str, options: str, launcher: str = "") -> Case:
    return Case(name, options, launcher, bare=True)


CASES = (
    _one("stream-llama", LLAMA, FLOAT32, STREAM),
    _one("stream-opt-bf16", OPT, BFLOAT16, STREAM),
    _one("stream-mixtral", MIXTRAL, FLOAT32, STREAM, CPU),
    _one("stream-ring", LLAMA, FLOAT32, STREAM, "--gpu-memory 0 --ring-depth 2"),
    _one("stream-resident-layers", LLAMA, FLOAT32, STREAM, "--gpu-memory 1"),
    _one("stream-kv", LLAMA, BFLOAT16, STREAM, "--kv-offload"),
    _one("stream-q8", LLAMA, FLOAT32, STREAM, "--quant-bits 8"),
    _one("stream-q4-mixtral-bf16", MIXTRAL, BFLOAT16, STREAM, "--quant-bits 4 --quant-group-size 32"),
    _one("stream-trace", OPT, FLOAT32, STREAM, "--trace trace.json"),
    _one("stream-norms-off", LLAMA, BFLOAT16, STREAM, "--norm-kernels off"),
    _one("stream-loops", LLAMA, FLOAT32, STREAM, "--loops 3 --warmup 1 --seed 5"),
    _one("stream-one-token", LLAMA, FLOAT32, STREAM, "--gen-len 1"),
    _one("stream-dummy", "--model opt-125m --dummy", STREAM),
    _one("stream-quality", "--model smollm2-135m", FLOAT32, STREAM, "--quality mmlu --quality-data inputs/mmlu.jsonl"),
    _ranks("stream-llama", "torchrun", 2, LLAMA, FLOAT32, STREAM),
    _ranks("stream-q4-mixtral", "torchrun", 2, MIXTRAL, BFLOAT16, STREAM, "--quant-bits 4 --kv-offload"),
    _ranks("stream-llama", "deepspeed", 1, LLAMA, FLOAT32, STREAM),
    _one("deepspeed-llama", LLAMA, FLOAT32, DEEPSPEED),
    _one("deepspeed-opt-bf16-cpu", OPT, BFLOAT16, DEEPSPEED, CPU),
    _one("deepspeed-mixtral-cpu-kv", MIXTRAL, FLOAT32, DEEPSPEED, CPU, "--kv-offload --norm-kernels off"),
    _one("deepspeed-disk", LLAMA, BFLOAT16, DEEPSPEED, DISK),
    _one("deepspeed-q8", LLAMA, FLOAT32, DEEPSPEED, "--quant-bits 8"),
    _one("deepspeed-q4-cpu", OPT, BFLOAT16, DEEPSPEED, CPU, "--quant-bits 4 --quant-group-size 32"),
    _one("deepspeed-config", LLAMA, FLOAT32, DEEPSPEED, CPU, "--ds-config inputs/ds.json"),
    _ranks("deepspeed-llama-cpu", "deepspeed", 2, LLAMA, FLOAT32, DEEPSPEED, CPU),
    _ranks("deepspeed-q8", "torchrun", 2, OPT, BFLOAT16, DEEPSPEED, "--quant-bits 8"),
    _one("accelerate-cpu", LLAMA, FLOAT32, ACCELERATE, CPU),
    _one("accelerate-disk-bf16", MIXTRAL, BFLOAT16, ACCELERATE, DISK),
    _one("resident-llama", LLAMA, FLOAT32, RESIDENT),
    _one("resident-mixtral-bf16-trace", MIXTRAL, BFLOAT16, RESIDENT, "--trace trace.json"),
    _one("resident-kv", OPT, FLOAT32, RESIDENT, "--kv-offload"),
    _one("plan-stream", DRY, STREAM, "--model llama-3.1-8b --quant-bits 4"),
    _one("plan-stream-too-large", DRY, STREAM, "--model opt-175b"),
    _one("plan-deepspeed-cpu", DRY, DEEPSPEED, CPU, "--model opt-1.3b"),
    _one("plan-deepspeed-q8-disk", DRY, DEEPSPEED, DISK, "--model bloom-560m --quant-bits 8 --kv-offload"),
    _one("plan-accelerate", DRY, ACCELERATE, CPU, "--model qwen3-8b"),
    _one("plan-resident", DRY, RESIDENT, "--model llama-3.2-1b"),
    _one("fails-nan", "--model inputs/llama-nan", FLOAT32, STREAM),
    _one("fails-nan-deepspeed", "--model inputs/llama-nan", FLOAT32, DEEPSPEED, CPU),
    _one("usage-group-size", LLAMA, FLOAT32, STREAM, "--quant-bits 4 --quant-group-size 48"),
    _one("usage-two-offloads", LLAMA, CPU, DISK),
    _one("usage-stream-disk", LLAMA, STREAM, DISK),
    _one("usage-ring-depth", LLAMA, STREAM, "--ring-depth 1"),
    _one("usage-engine", LLAMA, "--engine other"),
    _one("usage-gen-len", LLAMA, "--gen-len 0"),
    _one("usage-no-model", "--model inputs/nothing"),
    _one("usage-positions", LLAMA, "--prompt-len 125"),
    _one("usage-pinned-on-cpu", LLAMA, STREAM, "--pin-memory 1"),
    _bare("help", "--help"),
    _bare("help-of-all", "--help", "module"),
    _bare("help-of-report", "report --help", "module"),
    _bare("report", "report inputs/records --format md --all-columns", "module"),
)


def make_inputs(folder: Path) -> None:
    """Write checkpoints with seeded weights, and the other files that cases name, unless they are there."""
    if (folder / "whole").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    for family in FAMILIES:
        _seeded_model(family).save_pretrained(folder / family, max_shard_size="200KB")
    _with_nan(_seeded_model("llama")).save_pretrained(folder / "llama-nan")
    (folder / "ds.json").write_text(json.dumps({"zero_optimization": {"stage3_max_live_parameters": 100000}}))
    (folder / "mmlu.jsonl").write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
    records = Path(__file__).resolve().parent.parent / "benchmarks" / "results" / "h200"
    (folder / "records").mkdir(exist_ok=True)
    for path in records.glob("*.jsonl"):
        shutil.copy(path, folder / "records")
    (folder / "whole").touch()


def _seeded_model(family: str):
    """Return a random model whose weights are so large that its greedy tokens vary."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(11)
    ids = dict(vocab_size=320, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    config = AutoConfig.for_model(family, **SIZES, **FAMILIES[family], **ids)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:  # small embeddings, or a tied head would repeat the last token for ever
                parameter.normal_(0.0, 0.05 if "embed" in name else 0.2)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


def _with_nan(model):
    import torch

    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[0, 0] = float("nan")
    return model
