"""Small random checkpoints of real families, plain transformers as the reference, and ways to start runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

VOCAB = 320
# Files that take longest, first: two workers take whole files, and a long one at the end would leave one of them idle.
LONGEST = ("test_quality.py", "test_tokens.py", "test_stream.py", "test_csrc_compiles.py", "test_norms_patch.py", "test_run.py")
FAMILIES = {
    "opt": dict(model_type="opt", hidden_size=64, ffn_dim=256, num_hidden_layers=3, num_attention_heads=4, word_embed_proj_dim=64,
                max_position_embeddings=128, do_layer_norm_before=True),
    "bloom": dict(model_type="bloom", hidden_size=64, n_layer=3, n_head=4),
    "llama": dict(model_type="llama", hidden_size=64, intermediate_size=192, num_hidden_layers=3, num_attention_heads=8,
                  num_key_value_heads=2, max_position_embeddings=128, tie_word_embeddings=False),
    "mixtral": dict(model_type="mixtral", hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
                    num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=128,
                    tie_word_embeddings=False),
    "qwen3": dict(model_type="qwen3", hidden_size=64, intermediate_size=192, num_hidden_layers=3, num_attention_heads=4,
                  num_key_value_heads=2, head_dim=32, max_position_embeddings=128, tie_word_embeddings=False),
    "gpt_neox": dict(model_type="gpt_neox", hidden_size=64, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4,
                     max_position_embeddings=128, tie_word_embeddings=False),
}


def pytest_collection_modifyitems(items) -> None:
    items.sort(key=lambda item: LONGEST.index(item.path.name) if item.path.name in LONGEST else len(LONGEST))


def build_model(family: str, dtype="float32", lively=True):
    """A seeded random model; `lively` gives it weights so large that greedy tokens vary, else the family's own init."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(11)
    config = AutoConfig.for_model(**FAMILIES[family], vocab_size=VOCAB, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).eval()
    with torch.no_grad():
        if not lively:
            return model
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:  # small embeddings, or a tied head would repeat the last token for ever
                parameter.normal_(0.0, 0.05 if "embed" in name else 0.2)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    """family, dtype, lively -> checkpoint folder; made once a session."""
    made: dict[tuple, Path] = {}

    def get(family: str, dtype: str = "float32", lively: bool = True) -> Path:
        key = family, dtype, lively
        if key not in made:
            made[key] = tmp_path_factory.mktemp(f"{family}-{dtype}") / family
            build_model(family, dtype, lively).save_pretrained(made[key], max_shard_size="200KB")
        return made[key]

    return get


def plain_ids(folder: Path, ids, gen_len: int):
    """Greedy ids of plain transformers in float32, [batch, gen_len]."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config = GenerationConfig()
    settings = GenerationConfig(max_new_tokens=gen_len, do_sample=False, pad_token_id=0)
    with torch.no_grad():
        return model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings)[:, ids.shape[1]:]


@dataclass
class Finished:
    """A run that ended: exit code, what it printed, and its last record (None if it wrote none)."""

    code: int
    stdout: str
    stderr: str
    record: dict | None


@pytest.fixture
def run_model(tmp_path):
    """Start run_model.py as a real process: run_model(*options, launcher="python"|"deepspeed"|"torchrun", ranks=1)."""

    def start(*options, launcher: str = "python", ranks: int = 1, env: dict | None = None, timeout: float = 240,
              preexec=None) -> Finished:
        import torch

        if 0 < torch.cuda.device_count() < ranks:
            pytest.skip(f"{ranks} ranks need {ranks} GPUs, {torch.cuda.device_count()} here")
        log_dir = tmp_path / "logs"
        command = {
            "python": [sys.executable],
            "deepspeed": [str(Path(sys.executable).parent / "deepspeed"), "--num_accelerators", str(ranks), "--master_port", free_port()],
            "torchrun": [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--master-port", free_port()],
        }[launcher]
        path = str(Path(sys.executable).parent) + os.pathsep + os.environ["PATH"]
        done = subprocess.run([*command, str(ROOT / "run_model.py"), *map(str, options), "--log-dir", str(log_dir)],
                              capture_output=True, text=True, timeout=timeout, cwd=tmp_path, preexec_fn=preexec,
                              env={**os.environ, "PATH": path, **(env or {})})
        lines = [line for file in sorted(log_dir.glob("*.jsonl")) for line in file.read_text().splitlines()] if log_dir.is_dir() else []
        return Finished(done.returncode, done.stdout, done.stderr, json.loads(lines[-1]) if lines else None)

    return start


def free_port() -> str:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])
