"""One process for all GPUs: --num-gpus and its refusals, and launchers that start several ranks of the stream engine."""

from __future__ import annotations

import os

import pytest
from conftest import VOCAB, free_port, plain_ids

from zero_inference import load, plan, run
from zero_inference.cli import main
from zero_inference.config.run_config import RunConfig, make_config, non_default_options, parse_options, shell_words
from zero_inference.errors import UsageError
from zero_inference.measure.session import output_ids_sha256
from zero_inference.models.prompts import random_ids
from zero_inference.utils.launch import VARIABLES

TWO = "gpus=2x24GiB,host=64GiB,link=25GB/s,memory=1000GB/s"
ONE_PROCESS = "one process computes: rank 0; the other ranks end"


@pytest.fixture
def as_rank(monkeypatch):
    """as_rank(rank, ranks, per_node) -> the environment of a rank that a launcher started."""

    def set_variables(rank: int, ranks: int, per_node: int) -> dict[str, str]:
        numbers = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank % per_node, "LOCAL_WORLD_SIZE": per_node}
        where = {"MASTER_ADDR": "localhost", "MASTER_PORT": free_port(), "TORCHELASTIC_RUN_ID": "none"}
        found = {name: str(number) for name, number in numbers.items()} | where
        for name in VARIABLES:
            monkeypatch.delenv(name, raising=False)
        for name, value in found.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr("zero_inference.cli.FIRST_RANK_SPEAKS_S", 0)
        return found

    return set_variables


@pytest.mark.parametrize("launcher", ["torchrun", pytest.param("deepspeed", marks=pytest.mark.slow)])
def test_of_two_ranks_the_first_runs_alone(launcher, checkpoints, run_model, tmp_path, request):
    """The batch of 3 does not divide over 2 ranks."""
    if launcher == "torchrun":
        request.getfixturevalue("copied_runs")
    options = "--engine stream --dtype float32 --batch-size 3 --prompt-len 9 --gen-len 5 --loops 1 --warmup 0"
    done = run_model("--model", checkpoints("llama"), *options.split(), launcher=launcher, ranks=2, on_cpu=True)
    assert done.code == 0, done.stderr
    assert (done.stdout + done.stderr).count(ONE_PROCESS) == 1
    expected = plain_ids(checkpoints("llama"), random_ids(0, 3, 9, VOCAB), 5)
    assert done.record["output_ids_sha256"] == output_ids_sha256(expected)
    assert done.record["world_size"] == 1 and done.record["num_nodes"] == 1
    record, log = sorted((tmp_path / "logs").iterdir())
    assert "-n1x1-" in log.name and len(record.read_text().splitlines()) == 1


def test_from_python_the_other_ranks_get_nothing(checkpoints, as_rank, tmp_path, capfd):
    options = dict(engine="stream", dtype="float32", batch_size=1, prompt_len=8, gen_len=3, loops=1, warmup=0)
    launched = as_rank(1, 2, 2)
    assert run(checkpoints("llama"), **options, log_dir=tmp_path) is None and not list(tmp_path.iterdir())
    launched = as_rank(0, 2, 2)
    result = run(checkpoints("llama"), **options, log_dir=tmp_path)
    assert result.record["world_size"] == 1 and ONE_PROCESS in capfd.readouterr().err
    assert {name: os.environ.get(name) for name in launched} == launched, "the caller's, for its own group"


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_of_several_hosts_are_refused_on_each(rank, as_rank, capfd):
    as_rank(rank, 2, 1)
    assert main(["run_model.py", "--model", "opt-125m", "--dummy", "--engine", "stream", "--dry-run"]) == 2
    said = "--engine stream drives the GPUs of one host, and 2 ranks were started on 2 hosts"
    assert said in (err := capfd.readouterr().err) and "or use --engine deepspeed" in err


def test_other_ranks_end_before_they_import_torch(as_rank, monkeypatch):
    as_rank(1, 2, 2)
    monkeypatch.setitem(__import__("sys").modules, "zero_inference.runner", None)
    assert main(["run_model.py", "--model", "opt-125m", "--dummy", "--engine", "stream"]) == 0


@pytest.mark.parametrize(
    "options, said",
    [
        ("--engine stream --num-gpus 3", "--num-gpus 3: 2 are visible; use at most that, or all"),
        ("--engine stream --num_gpus 0", "--num-gpus 0: choose all, or a number of at least 1"),
        ("--engine stream --num-gpus many", "--num-gpus many: choose all, or a number of at least 1"),
        ("--num-gpus 2", "--num-gpus 2: --engine deepspeed has a process for each GPU, which a launcher starts"),
        ("--engine accelerate --cpu-offload --num-gpus 2", "--num-gpus belongs to --engine stream or resident"),
    ],
)
def test_refused_numbers_of_gpus(options, said, capfd):
    asked = ["run_model.py", "--model", "opt-125m", "--dummy", "--dry-run", "--assume", TWO, *options.split()]
    try:
        code = main(asked)
    except SystemExit as error:  # of a value that no number of GPUs can have
        code = error.code
    assert code == 2 and said in capfd.readouterr().err


def test_more_gpus_than_one_need_gpus(capfd):
    asked = "run_model.py --model opt-125m --dummy --dry-run --engine stream --assume gpus=0,host=8GiB".split()
    assert main([*asked, "--num-gpus", "2"]) == 2
    assert "--num-gpus 2: there is no GPU; drop it" in capfd.readouterr().err
    for number in ("1", "all"):
        assert main([*asked, "--num-gpus", number]) == 0


def test_keywords_from_python(no_gpu):
    for call in (load, run):
        with pytest.raises(UsageError, match="--num-gpus 2: there is no GPU"):
            call("opt-125m", dummy=True, engine="stream", num_gpus=2)
    rows = plan("opt-125m", dummy=True, engine="stream", quant_bits=16, batch_size=1, assume=TWO, num_gpus="all")
    assert {(row.gpus, row.options["num_gpus"]) for row in rows} == {(2, 2)}


def test_ranks_that_have_a_gpu_each_take_no_number(as_rank, capfd):
    as_rank(0, 2, 2)
    asked = "run_model.py --model opt-125m --dummy --dry-run --engine resident --batch-size 2 --assume".split()
    assert main([*asked, TWO, "--num-gpus", "2"]) == 2
    assert "--num-gpus 2: 2 ranks were started, with a GPU each; start one process" in capfd.readouterr().err
    assert main([*asked, TWO]) == 0


@pytest.mark.parametrize("given, kept", [("all", "all"), ("ALL", "all"), (2, 2), ("2", 2), (None, None)])
def test_a_number_of_gpus_is_all_or_a_number(given, kept):
    config = make_config({"model": "opt-125m", "engine": "stream", "num_gpus": given})
    assert config.num_gpus == kept
    assert parse_options(shell_words(non_default_options(config))) == config
    for wrong in (True, 1.5, -1, ""):
        with pytest.raises(UsageError, match="--num-gpus"):
            RunConfig(engine="stream", num_gpus=wrong).validate()
