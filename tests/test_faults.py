"""What is promised when something breaks, as a table: a fault, when it strikes, how the run was started, what is true afterwards.

A row is one line of `FAULTS`; docs/faults.md says the same in words. Whatever a row says, these hold for each: the run ends within
its time, no process of it is left, what the files held before is still there as it was, every line of the record is whole, and
errors are lines, not tracebacks.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
from conftest import FAMILIES, ROOT, VOCAB, free_port, launch_words, start_python, too_few_gpus, without_gpus
from forks import PROGRAM, ForkServer, Process, rank_variables
from torch.distributed import TCPStore

from zero_inference.records.read import parse_log
from zero_inference.utils import write_benchmark_log
from zero_inference.utils.watch import store_key

ENDLESS = ("--loops", "100000", "--gen-len", "100")
SHORT = ("--loops", "1", "--warmup", "0", "--gen-len", "3")
EARLIER = json.dumps({"status": "ok", "model": "earlier"}) + "\n"


# One of each kind that takes no long wait, which `make test` runs: a full disk, a closed pipe, a bad input.
FAST = "disk full at the record", "reader of stdout leaves", "checkpoint cut short"


@dataclass
class Run:
    """A run that is under way: its processes by rank, and its files in `folder`."""

    folder: Path
    processes: list[Process] = field(default_factory=list)
    started: list[psutil.Process] = field(default_factory=list)
    port: str = field(default_factory=free_port)

    def __post_init__(self) -> None:
        self.log, self.record, self.offload = (self.folder / name for name in ("run.log", "run.jsonl", "offload"))

    def text(self, name: str) -> str:
        return "".join(path.read_text(errors="replace") for path in sorted(self.folder.glob(f"*.{name}")))

    def wait_for(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 600  # DeepSpeed's modules may have to be compiled first
        while not condition():
            runs = any(process.poll() is None for process in self.processes)
            assert runs and time.monotonic() < deadline, self.text("err")
            time.sleep(0.05)

    def remains(self) -> list[Path]:
        """What a run may not leave: files in the offload folder, and DeepSpeed's in shared memory."""
        return [*self.offload.glob("*"), *Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_*_{self.port}_*")]

    def everyone(self) -> list[psutil.Process]:
        """The processes that were started and live, and those that they started."""
        living = [psutil.Process(process.pid) for process in self.processes if process.poll() is None]
        return [one for process in living for one in [process, *process.children(True)]]

    def rank(self, number: int) -> psutil.Process:
        """The process of a rank, whoever started it."""
        if len(self.processes) > 1:
            return psutil.Process(self.processes[number].pid)
        return next(
            one
            for one in self.everyone()
            if one.environ().get("RANK", "0") == str(number)
            and "-m" not in one.cmdline()[:3]
            and any(word.endswith("run_model.py") for word in one.cmdline())
        )


# When: each returns once the run is so far.
def at_once(run: Run) -> None:
    pass


def met(run: Run) -> None:
    """The second rank has told the first that it lives; a rank that never did is waited for much longer."""
    store = TCPStore("127.0.0.1", int(run.port), is_master=False, timeout=timedelta(minutes=5))
    run.wait_for(lambda: store.check([store_key(1)]))


def loading(run: Run) -> None:
    """DeepSpeed's files are being written, and are so many that it takes a while to remove them."""
    run.wait_for(lambda: len(list(run.offload.glob("*/zero_stage_3/*/rank0/*"))) > 1)
    (workspace,) = run.offload.iterdir()
    (workspace / "many").mkdir()
    for number in range(2000):
        (workspace / "many" / str(number)).touch()


def measuring(run: Run) -> None:
    run.wait_for(lambda: "loaded " in run.text("err"))
    time.sleep(0.5)


# What breaks.
def nothing(run: Run) -> None:
    pass


def stop(number: int) -> Callable[[Run], None]:
    return lambda run: run.rank(number).send_signal(signal.SIGSTOP)


def kill(number: int) -> Callable[[Run], None]:
    return lambda run: run.rank(number).kill()


def kill_launcher(run: Run) -> None:
    run.processes[0].kill()


def stop_all(number: int) -> Callable[[Run], None]:
    """As a terminal does it: the signal goes to all processes at once. deepspeed then sends its ranks a second one."""
    return lambda run: os.killpg(run.processes[0].pid, number)


def full(name: str) -> Callable[[Run], None]:
    """In place of the file, before the run starts."""
    return lambda run: (run.folder / name).unlink() or (run.folder / name).symlink_to("/dev/full")


# What is loaded.
def opt(run: Run, checkpoints) -> Path:
    return checkpoints("opt")


def cut_short(run: Run, checkpoints) -> Path:
    """A checkpoint of which one file ends early."""
    copied = shutil.copytree(checkpoints("opt"), run.folder / "model")
    shard = sorted(copied.glob("*.safetensors"))[-1]
    os.truncate(shard, shard.stat().st_size - 100)
    return copied


def wide(run: Run, checkpoints) -> Path:
    """A configuration of 2 GB of weights, in matrices that are large enough for DeepSpeed to swap."""
    sizes = dict(hidden_size=2048, intermediate_size=4096, num_hidden_layers=12, vocab_size=VOCAB)
    (run.folder / "model").mkdir()
    (run.folder / "model" / "config.json").write_text(json.dumps(FAMILIES["llama"] | sizes))
    return run.folder / "model"


@dataclass(frozen=True)
class Fault:
    """A row: `before` the run starts and then `breaks` once it is `when`; what has to be true is in the last four."""

    name: str
    launcher: str  # python, torchrun, deepspeed; by hand: two ranks without a launcher
    when: Callable[[Run], None]
    breaks: Callable[[Run], None]
    code: int  # of the ranks that are left, or of the launcher; -1: any but 0
    says: str = ""  # on stderr
    record: str | None = None  # status of the one record that is added; None: none is
    shown: bool = False  # whether the results are on stdout
    before: Callable[[Run], None] = nothing
    options: tuple[str, ...] = ENDLESS
    shell: str = ""  # that starts it; else it is started as a copy, or by its launcher
    within_s: float = 30
    victim: int | None = None  # a rank that cannot end by itself
    model: Callable = opt
    ranks: int = 2


TO_DISK = ("--engine", "deepspeed", "--dummy", "--disk-offload", "--gen-len", "2")
# fmt: off
FAULTS = (
    Fault("disk full at the record", "python", at_once, nothing, 1, "record was not written", None, True,
        full("run.jsonl"), SHORT),
    Fault("reader of stdout leaves", "python", at_once, nothing, 141, "", "ok", options=SHORT,
        shell="{command} | true; exit ${{PIPESTATUS[0]}}"),
    Fault("stdout on a full disk", "python", at_once, nothing, 1, "could not be printed", "ok", options=SHORT,
        shell="exec {command} >/dev/full"),
    Fault("stderr closed", "python", at_once, nothing, 0, "", "ok", True, options=SHORT, shell="exec {command} 2>&-"),
    Fault("checkpoint cut short", "python", at_once, nothing, 1, "damaged, or not a weight file", "failed",
        options=SHORT, model=cut_short),
    Fault("terminal closed", "python", loading, stop_all(signal.SIGHUP), 128 + signal.SIGHUP, "stopped by", "failed",
        options=TO_DISK, model=wide),
    Fault("interrupted from the keyboard", "deepspeed", loading, stop_all(signal.SIGINT), -1, "stopped by", "failed",
        options=TO_DISK, model=wide, ranks=1),
    Fault("first rank killed", "torchrun", measuring, kill(0), 1, "error: ", "failed"),
    Fault("launcher killed", "deepspeed", measuring, kill_launcher, -1, "the launcher has ended", "failed"),
    Fault("launcher of the stream engine killed", "deepspeed", measuring, kill_launcher, -1, "the launcher has ended", "failed",
        options=("--engine", "stream", *ENDLESS)),
    Fault("second rank killed", "deepspeed", measuring, kill(1), -1, "error: ", "failed"),
    Fault("first rank stopped", "by hand", measuring, stop(0), 1, "has said nothing for 15 s", "failed", victim=0),
    Fault("rank stopped before loading", "by hand", met, stop(1), 1, "has said nothing for 15 s", "failed", victim=1),
)
# fmt: on


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(fault, id=fault.name.replace(" ", "-"), marks=[] if fault.name in FAST else [pytest.mark.slow])
        for fault in FAULTS
    ],
)
def test_fault(fault: Fault, checkpoints, fork_server, tmp_path):
    run = Run(tmp_path)
    write_benchmark_log(run.log, *range(10))
    run.record.write_text(EARLIER)
    block = run.log.read_text()
    fault.before(run)
    try:
        start(run, fault, fault.model(run, checkpoints), fork_server(PROGRAM))
        fault.when(run)
        run.started = run.everyone()
        fault.breaks(run)
        struck = time.monotonic()
        rest = [process for number, process in enumerate(run.processes) if number != fault.victim]
        for process in rest:
            process.wait(timeout=fault.within_s + 90)
        stuck = {run.processes[fault.victim].pid} if fault.victim is not None else set()
        # deepspeed ends before its ranks, which may still be removing their files
        left = psutil.wait_procs(
            [one for one in run.started if one.pid not in stuck],
            timeout=fault.within_s if fault.launcher == "deepspeed" else 5,
        )[1]
        took = time.monotonic() - struck
        # not those that have ended and were not waited for
        left = [one for one in left if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]
        assert not left, (left, run.text("err"))
    finally:
        for process in run.processes:
            process.kill()
            process.wait()
        for one in run.started:
            if one.is_running():
                one.kill()
    errors = run.text("err")
    assert fault.when is at_once or took < fault.within_s, errors
    assert all(process.returncode == fault.code if fault.code >= 0 else process.returncode for process in rest), errors
    assert fault.says in errors and f'File "{ROOT}/zero_inference' not in errors, errors
    assert "Traceback" not in errors or fault.launcher in ("torchrun", "deepspeed"), errors  # which show their own
    assert "frame #0" not in errors or fault.launcher in ("python", "by hand"), (
        errors
    )  # whose copies have imported torch before
    assert not run.remains()
    assert ("token/s" in run.text("out")) == fault.shown
    if not run.log.is_symlink():
        assert run.log.read_text().startswith(block) and len(parse_log(run.log)) == run.log.read_text().count("\n") / 4
    if not run.record.is_symlink():
        lines = run.record.read_text().splitlines(keepends=True)
        assert lines[0] == EARLIER and all(line.endswith("\n") for line in lines)
        assert [json.loads(line)["status"] for line in lines[1:]] == ([fault.record] if fault.record else []), errors


def start(run: Run, fault: Fault, model: Path, server: ForkServer) -> None:
    options = ["--model", model, *"--dtype float32 --prompt-len 8 --log-file".split(), run.log, *fault.options]
    if "--disk-offload" in options:
        options += ["--offload-dir", run.offload]
    elif fault.launcher == "python":
        options += ["--engine", "stream"]
    elif "--engine" not in options:
        options += ["--engine", "deepspeed", "--cpu-offload"]
    if fault.launcher != "python":
        options += ["--batch-size", "2"]
    environment = without_gpus() if too_few_gpus(2) else {**os.environ}
    environment["PATH"] = os.path.dirname(sys.executable) + os.pathsep + environment["PATH"]
    launch = launch_words(fault.launcher, fault.ranks, run.port)
    if fault.shell:
        launch = ["bash", "-c", fault.shell.format(command='"$@"'), "bash", sys.executable]
    each: list[dict[str, str]] = [{}]
    if fault.launcher == "by hand":
        each = [rank_variables(rank, fault.ranks, run.port) for rank in range(fault.ranks)]
    program = [ROOT / "run_model.py", *options]
    for number, own in enumerate(each):
        out, err = (run.folder / f"{number}.{name}" for name in ("out", "err"))
        started = start_python(server, program, ROOT, out, err, environment | own, launch, session=True)
        run.processes.append(started)
