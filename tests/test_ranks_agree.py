"""What ranks must decide or measure together, tried by two real processes that see different things."""

from __future__ import annotations

import json
import shutil

import pytest
from conftest import ROOT, free_port, start_python, without_gpus
from forks import PROGRAM, kill_all, rank_variables, start_all, wait_for_all

PRELUDE = f"""
import json, os, sys
sys.path.insert(0, {str(ROOT)!r})
import torch
from zero_inference.utils import ranks as group
from zero_inference.measure import hardware_rates
from zero_inference.config.run_config import RunConfig
from zero_inference.models.spec import resolve_model
from zero_inference.planning.make_plan import make_plan, plan_run
from zero_inference.planning.plan import build_job
from zero_inference.hardware.machine import Machine
rank = int(os.environ["RANK"])
ranks = group.detect_ranks()
"""
PREFETCH = (
    PRELUDE
    + """
free = [1 << 34, 300_000][rank]  # bytes; a decoder layer has 0.2 MB
Machine.free_device_bytes = lambda self, devices, ranks=None: (int(ranks.minimum(free)) if ranks else free,)
config = RunConfig(model=sys.argv[1], dtype="float32", cpu_offload=True, batch_size=2, prompt_len=8, gen_len=4).validate()
spec = resolve_model(config, "cpu")
group.start_process_group(ranks)
if rank == 1:  # what a plan asks is asked of one rank alone, and must wait for nobody
    make_plan(build_job(config, spec, ranks))
loaded = plan_run(config, spec, ranks).load()
ids = torch.arange(8).view(1, 8) + 3
output = loaded.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False, pad_token_id=0)
zero = loaded.facts["ds_config"]["zero_optimization"]
print("RESULT", json.dumps({"free": free, "zero": zero, "ids": output.tolist()}))
loaded.close()
group.stop_process_group()  # or a gloo thread that outlives Python's end may abort the process
"""
)
DISKS = (
    PRELUDE
    + """
measured = []

def disk_read_rate(folder, file_bytes):
    assert file_bytes == 1, file_bytes  # what the weights are said to be
    rate = real(folder, file_bytes)
    measured.append(rate.gb_per_s)
    return rate

real, hardware_rates.disk_read_rate = hardware_rates.disk_read_rate, disk_read_rate
config = RunConfig(model="opt-125m", dummy=True, disk_offload=True, offload_dir=sys.argv[1], batch_size=2).validate()
group.start_process_group(ranks)
rate = hardware_rates.disks_gb_per_s(config, ranks, 1)
print("RESULT", json.dumps({"nodes": ranks.num_nodes, "measured": measured, "disk_gbps": rate}))
group.stop_process_group()
"""
)


def environment(rank: int, per_node: int, port: str) -> dict[str, str]:
    local = {"LOCAL_RANK": str(rank % per_node), "LOCAL_WORLD_SIZE": str(per_node)}
    return without_gpus() | rank_variables(rank, 2, port) | local


@pytest.fixture
def two_ranks(fork_server, tmp_path):
    """program, argument, per_node -> what it prints in two gloo processes, `per_node` of which a launcher would have started on a node."""

    def results(program: str, argument, per_node: int) -> list[dict]:
        file, port = tmp_path / "program.py", free_port()
        file.write_text(program)
        outputs = [tmp_path / f"{rank}.out" for rank in (0, 1)]
        ranks = start_all(
            lambda rank: start_python(
                fork_server(PROGRAM),
                [file, argument],
                tmp_path,
                *[outputs[rank]] * 2,
                environment(rank, per_node, port),
            ),
            (0, 1),
        )
        assert wait_for_all(ranks, timeout=200) == [0, 0], [output.read_text() for output in outputs]
        lines = [line for output in outputs for line in output.read_text().splitlines() if line.startswith("RESULT ")]
        return [json.loads(line.removeprefix("RESULT ")) for line in lines]

    return results


def test_ranks_with_different_free_memory_resolve_one_zero3_configuration(two_ranks, checkpoints):
    first, second = two_ranks(PREFETCH, checkpoints("llama"), per_node=2)
    assert (first["free"], second["free"]) == (1 << 34, 300_000)
    assert first["zero"] == second["zero"] and first["ids"] == second["ids"]
    layer = 2 * 64 * 64 + 2 * 64 * 16 + 3 * 64 * 192 + 2 * 64
    assert first["zero"]["stage3_prefetch_bucket_size"] == layer, "as deep as the fuller device allows"


@pytest.mark.parametrize("per_node", [1, 2])
def test_the_disk_rate_is_the_sum_of_the_nodes(two_ranks, per_node, tmp_path):
    first, second = two_ranks(DISKS, tmp_path, per_node)
    assert first["nodes"] == 2 // per_node
    assert (len(first["measured"]), len(second["measured"])) == (1, 1 if per_node == 1 else 0)
    rates = first["measured"] + second["measured"]
    expected = None if None in rates else pytest.approx(sum(rates), abs=1e-5)
    assert first["disk_gbps"] == expected and second["disk_gbps"] == expected


AGREE = (
    PRELUDE
    + """
from dataclasses import replace
from zero_inference.runner import compared_inputs, compared_options, refuse_differences
from zero_inference.errors import UsageError
group.start_process_group(ranks)
config = RunConfig(model=sys.argv[1], engine="resident", batch_size=2, log_dir=f"logs{rank}").validate()
other = RunConfig(**config.as_dict() | {"model": os.path.join(os.path.dirname(sys.argv[1]), "other")})
spec, found = resolve_model(config, "cpu"), []
ids = torch.arange(8)

def tried(compared, *args):
    try:
        found.append(refuse_differences(ranks, lambda: compared(*args)))
    except UsageError as error:
        found.append(str(error))

tried(compared_options, replace(config, verbose=rank), spec, ranks, {})
tried(compared_options, replace(config, loops=2 + rank), spec, ranks, {})
tried(compared_options, config, spec, ranks, {"mmlu": [{"answer": rank}]})
tried(compared_inputs, spec, ids)
tried(compared_inputs, spec, ids + rank)
tried(compared_inputs, [spec, resolve_model(other, "cpu")][rank], ids)
print("RESULT", json.dumps(found))
group.stop_process_group()
"""
)


def test_ranks_that_differ_are_refused_on_each(two_ranks, checkpoints, tmp_path):
    for name in ("one", "other"):
        shutil.copytree(checkpoints("llama"), tmp_path / name)
    last = max((tmp_path / "other").glob("*.safetensors"))
    last.write_bytes(last.read_bytes()[:-1] + b"\x01")  # a bit of one weight
    first, second = two_ranks(AGREE, tmp_path / "one", per_node=2)
    assert first == second
    alike, loops, data, same, prompts, weights = first
    assert alike is None and same is None
    assert loops.startswith("rank 0 has --loops 2 and rank 1 has 3: ")
    for text, what in ((data, "--quality-data"), (prompts, "the prompts"), (weights, "the weights")):
        assert f"rank 0 has {what}" in text


def test_ranks_that_were_started_with_different_lengths_end(fork_server, checkpoints, tmp_path):
    """They waited for each other until somebody came, and the one with more to do for the one that had ended."""
    options = "--engine resident --batch-size 2 --prompt-len 8 --loops 1 --warmup 0".split()
    command = [ROOT / "run_model.py", "--model", checkpoints("llama"), *options, "--log-dir", tmp_path / "logs"]
    port = free_port()

    def start(rank: int):
        files = tmp_path / "out", tmp_path / f"{rank}.err"
        words = [*command, "--gen-len", 4 + rank]
        return start_python(fork_server(PROGRAM), words, tmp_path, *files, environment(rank, 2, port))

    ranks = start_all(start, (0, 1))
    try:
        code = ranks[0].wait(timeout=100)
    finally:
        kill_all(ranks)  # the other one lets the first rank speak for 10 s
    error = (tmp_path / "0.err").read_text()
    assert code == 2 and "error: rank 0 has --gen-len 4 and rank 1 has 5: " in error, error
    assert not list((tmp_path / "logs").iterdir())
