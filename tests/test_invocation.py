"""The commands that are shown to be copied: right in a clone, and where only the package is installed."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, free_port, without_gpus

from zero_inference.cli import console_main, console_parser
from zero_inference.config.run_config import RunConfig
from zero_inference.config.run_options import parse_options
from zero_inference.planning.search import command_of
from zero_inference.utils.processes import as_installed_command, move_rank_option, run_command


@pytest.mark.parametrize("ranks, in_clone, installed", [
    (None, "python run_model.py", "zero-inference run"),
    (2, "deepspeed --num_gpus 2 run_model.py", "deepspeed --num_gpus 2 --module zero_inference run"),
])  # fmt: skip
def test_a_command_is_typed_as_it_works_in_the_current_folder(ranks, in_clone, installed, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert run_command(["--prompt", "a b"], ranks) == f"{in_clone} --prompt 'a b'"
    assert as_installed_command(run_command(["--dummy"], ranks)) == f"{installed} --dummy"
    monkeypatch.chdir(tmp_path)
    assert run_command(["--prompt", "a b"], ranks) == f"{installed} --prompt 'a b'"


def test_a_configuration_starts_with_the_launcher_that_its_engine_needs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    stream = RunConfig(model="opt-125m", engine="stream").validate()
    deepspeed = RunConfig(model="opt-125m", cpu_offload=True).validate()
    assert command_of(stream).startswith("zero-inference run ") and "deepspeed --num_gpus 1 " not in command_of(stream)
    assert command_of(stream, 2).startswith("deepspeed --num_gpus 2 --module zero_inference run ")
    words = shlex.split(command_of(deepspeed))
    assert words[:6] == ["deepspeed", "--num_gpus", "1", "--module", "zero_inference", "run"]
    assert parse_options(words[6:]) == deepspeed


def test_the_examples_of_the_installed_command_name_no_script(capsys):
    with pytest.raises(SystemExit):
        console_main(["zero-inference", "run", "--help"])
    out = capsys.readouterr().out
    assert "  zero-inference run facebook/opt-66b --engine stream --quant-bits 4\n" in out
    assert "  deepspeed --num_gpus 1 --module zero_inference run facebook/opt-66b --cpu-offload\n" in out
    assert "python run_model.py" not in out


def test_the_launcher_may_write_the_rank_first():
    given = ["zero-inference", "--local_rank=1", "run", "--dummy"]
    assert move_rank_option(given) == ["zero-inference", "run", "--local_rank=1", "--dummy"]
    assert console_parser().parse_args(move_rank_option(given)[1:]).local_rank == 1
    assert move_rank_option(["zero-inference", "plan"]) == ["zero-inference", "plan"]


def test_the_launcher_starts_the_installed_package(tmp_path):
    """Through deepspeed's own launcher, in a folder without run_model.py."""
    command = as_installed_command(run_command(["--model", "opt-125m", "--dummy", "--cpu-offload", "--dry-run"], 1))
    launcher = [sys.executable, "-m", "deepspeed.launcher.runner"]  # which is what `deepspeed` runs
    words = [*launcher, "--master_port", free_port(), *shlex.split(command)[1:]]
    environment = without_gpus() | {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin"}
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "It fits." in done.stdout, done.stderr[-2000:]
