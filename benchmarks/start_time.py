"""How long a run of a model of three small layers takes, which is nearly all start, and what importing the libraries is of it.

    python benchmarks/start_time.py [CHECKOUT ...]

Each checkout (this one if none is named) in turn, five times. Prints medians and ranges in seconds, and GB/s (1e9 bytes) at which
256 MiB of memory are touched for the first time.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

ROUNDS = 5
ENGINES = {"resident": ["--engine", "resident"], "stream": ["--engine", "stream"], "deepspeed": ["--cpu-offload"]}
MODEL = dict(
    architectures=["OPTForCausalLM"],
    model_type="opt",
    hidden_size=64,
    ffn_dim=256,
    num_hidden_layers=3,
    num_attention_heads=4,
    word_embed_proj_dim=64,
    max_position_embeddings=128,
    vocab_size=320,
)
SHORT = ["--dummy", "--dtype", "float32", "--prompt-len", "8", "--gen-len", "3", "--loops", "1", "--warmup", "0"]
IMPORTS = "import torch, transformers.generation, transformers.modeling_utils, transformers.models.opt.modeling_opt"


def main(checkouts: list[Path]) -> int:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(MODEL))
        for name, options in ENGINES.items():
            commands = {
                f"{name}, {checkout.name}": [
                    str(checkout / "run_model.py"),
                    "--model",
                    folder,
                    *options,
                    *SHORT,
                    "--log-dir",
                    folder,
                ]
                for checkout in checkouts
            }
            for command in commands.values():  # compiles what is missing
                seconds(command)
            in_turn(commands)
    in_turn(
        {"imports": ["-c", IMPORTS], "imports, no garbage collection": ["-c", f"import gc; gc.disable(); {IMPORTS}"]}
    )
    own_s = Counter()
    for line in seconds(["-X", "importtime", "-c", IMPORTS])[1].splitlines():
        own, _, module = (
            line.removeprefix("import time:").split("|") if line.startswith("import time:") else ("", "", "")
        )
        if own.strip().isdigit():
            own_s[module.strip().partition(".")[0]] += int(own) / 1e6
    print(
        "of the imports (with the cost of timing them): "
        + ", ".join(f"{name} {own:.2f}" for name, own in own_s.most_common(6))
    )
    touch = (
        "import mmap, time; page = bytes(1 << 20); memory = mmap.mmap(-1, 256 << 20); start = time.perf_counter()\n"
        "for _ in range(256): memory.write(page)\n"
        "print((256 << 20) / (time.perf_counter() - start) / 1e9)"
    )
    touched = [
        float(subprocess.run([sys.executable, "-c", touch], capture_output=True, text=True).stdout)
        for _ in range(ROUNDS)
    ]
    print(f"first touch of memory: {min(touched):.2f} to {max(touched):.2f} GB/s")
    return 0


def in_turn(commands: dict[str, list[str]]) -> None:
    spent: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(ROUNDS):
        for name, command in commands.items():
            spent[name].append(seconds(command)[0])
    for name, times in spent.items():
        print(f"{name}: {statistics.median(times):.2f} s ({min(times):.2f} to {max(times):.2f})", flush=True)


def seconds(command: list[str]) -> tuple[float, str]:
    """Wall time of Python with `command`, and its stderr."""
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    return time.perf_counter() - start, done.stderr


if __name__ == "__main__":
    sys.exit(main([Path(name).resolve() for name in sys.argv[1:]] or [Path(__file__).resolve().parent.parent]))
