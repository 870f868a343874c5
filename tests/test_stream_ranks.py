"""The stream engine with the CPU and two real ranks: the ids of plain transformers, one copy of the weights, one count."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from conftest import ROOT, VOCAB, free_port, plain_ids, start_python, without_gpus
from forks import PROGRAM, rank_variables, start_all, wait_for_all
from test_stream import load
from transformers import AutoModelForCausalLM

from zero_inference.cli import main
from zero_inference.models.prompts import random_ids

BATCH, PROMPT, GEN = 4, 9, 8
SHARES = ("0.3", "0.7", "1")
# Of each rank's program: one model after the other, as sys.argv[1] says.
PRELUDE = f"""
import json, os, re, sys
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "tests")!r}]
import torch
from test_stream import load
from test_stream_cpu import prefetcher_of
from zero_inference.kv_cache.device import DeviceKVCache
from zero_inference.measure.loops import measure_loops
from zero_inference.models.prompts import random_ids
from zero_inference.utils.ranks import detect_ranks, start_process_group, stop_process_group

cases, results = json.loads(sys.argv[1]), []
ranks = detect_ranks()
start_process_group(ranks)

def mapped():
    "Of the memory that ranks share: (bytes mapped, this rank's part of what is there), of each mapping."
    text = open("/proc/self/smaps").read()
    found = re.findall(r"^\\S+ [^\\n]*memfd:zero-inference.*?^Size: +(\\d+) kB.*?^Pss: +(\\d+) kB", text, re.M | re.S)
    return [(int(size) << 10, int(part) << 10) for size, part in found]

def finish():
    print("RESULT", json.dumps(results))
    stop_process_group()
"""
GENERATE = (
    PRELUDE
    + f"""
for options in cases:
    loaded, spec, _ = load(options.pop("folder"), batch_size={BATCH}, prompt_len={PROMPT}, gen_len={GEN}, **options)
    own = random_ids(0, {BATCH}, {PROMPT}, {VOCAB})[2 * ranks.rank : 2 * ranks.rank + 2]
    cache = DeviceKVCache(spec.config, {PROMPT + GEN})
    found = measure_loops(loaded, own, {GEN}, 2, 0, ranks, lambda: cache.reset() or cache)
    prefetcher = prefetcher_of(loaded)
    ranks.barrier()
    results.append(dict(
        ids=found.output_ids.tolist(),
        cpu_bytes=found.loops[-1].moved.cores_bytes_per_step,
        to_device=found.loops[-1].moved.host_to_device_bytes_per_step,
        stream={{name: loaded.facts["stream"][name] for name in ("computed_bytes", "fetched_bytes")}},
        shared=sum(prefetcher.blocks[index].layout.nbytes for index in prefetcher.placement.cpu_computed),
        host_bytes=prefetcher.placement.host_bytes,
        private=sum(buffer.numel() for block, buffer in prefetcher.store.buffers.items() if block not in prefetcher.store.shared),
        mapped=mapped(),
    ))
    ranks.barrier()
    del prefetcher, cache
    loaded.close()
    del loaded
    results[-1]["left"] = [os.readlink(f"/proc/self/fd/{{fd}}") for fd in os.listdir("/proc/self/fd") if fd != "3"
                           and os.path.lexists(f"/proc/self/fd/{{fd}}")]
finish()
"""
)
PASSES = (
    PRELUDE
    + f"""
options = cases[0]
loaded, _, _ = load(options["folder"], batch_size={BATCH}, prompt_len={PROMPT}, gen_len={GEN}, cpu_compute=options["cpu_compute"])
torch.manual_seed(ranks.rank)
for lengths in options["lengths"]:
    ids = torch.randint(0, {VOCAB}, (1, lengths[ranks.rank]))
    before = loaded.transfers.snapshot()
    with torch.no_grad():
        logits = loaded.model(ids, use_cache=False).logits
    moved = [after - one for after, one in zip(loaded.transfers.snapshot(), before)]
    results.append(dict(ids=ids.tolist(), logits=logits.tolist(), cpu_bytes=moved[3]))
loaded.close()
finish()
"""
)
REFUSED = (
    PRELUDE
    + """
import resource
from zero_inference.errors import RunError
from zero_inference.utils.host_memory import SharedMemory

def refused(nbytes):
    try:
        SharedMemory(nbytes, ranks)
    except RunError as error:
        return str(error)

results.append(refused(1 << 60))
before = resource.getrlimit(resource.RLIMIT_AS)
if ranks.rank == 1:
    taken = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + (300 << 20), before[1]))
results.append(refused(1 << 30))
resource.setrlimit(resource.RLIMIT_AS, before)
memory = SharedMemory(3, ranks)
memory.bytes[ranks.rank] = 1 + ranks.rank
memory.settle(pinned=False)
results.append(memory.bytes.tolist())
finish()
"""
)


@pytest.fixture
def two_ranks(fork_server, tmp_path):
    """program, cases -> what each of two gloo processes of this host found for each case."""

    def results(program: str, cases: list[dict]) -> list[list[dict]]:
        file, port = tmp_path / "program.py", free_port()
        file.write_text(program)
        outputs = [tmp_path / f"{rank}.out" for rank in (0, 1)]
        text = json.dumps(cases, default=str)
        started = start_all(
            lambda rank: start_python(
                fork_server(PROGRAM),
                [file, text],
                tmp_path,
                outputs[rank],
                outputs[rank],
                without_gpus() | rank_variables(rank, 2, port),
            ),
            (0, 1),
        )
        assert wait_for_all(started, timeout=200) == [0, 0], [output.read_text() for output in outputs]
        found = [re.findall(r"^RESULT (.*)$", output.read_text(), re.M) for output in outputs]
        return [json.loads(line) for (line,) in found]

    return results


@pytest.mark.parametrize("family", ["opt", "llama", "mixtral"])
def test_any_share_gives_the_ids_of_transformers(family, checkpoints, two_ranks):
    folder = checkpoints(family)
    expected = plain_ids(folder, random_ids(0, BATCH, PROMPT, VOCAB), GEN)
    first, second = two_ranks(GENERATE, [{"folder": folder, "cpu_compute": share} for share in SHARES])
    for share, one, other in zip(SHARES, first, second, strict=True):
        assert torch.equal(torch.tensor(one["ids"]), expected), share
        assert one["ids"] == other["ids"]
        assert one["stream"] == other["stream"]
        assert one["cpu_bytes"] > 0 and other["cpu_bytes"] == 0, "counted once"
        if family != "mixtral":  # of experts it is an expectation
            assert one["cpu_bytes"] == one["stream"]["computed_bytes"]
        assert one["to_device"] >= one["stream"]["fetched_bytes"] / 2, "each brings a half, and what the CPU gave"
        assert (share == "1") == (not one["stream"]["fetched_bytes"])


@pytest.mark.slow
@pytest.mark.parametrize("bits", [8, 4])
def test_codes_give_the_ids_of_the_dequantized_weights(bits, checkpoints, two_ranks):
    options = {"quant_bits": bits, "quant_group_size": 32}
    folders = [checkpoints(family) for family in ("opt", "llama", "mixtral")]
    cases = [{"folder": folder, "cpu_compute": share, **options} for folder in folders for share in SHARES]
    found, _ = two_ranks(GENERATE, cases)
    for folder, results in zip(folders, (found[:3], found[3:6], found[6:]), strict=True):
        by_device = ids_of_one_rank(folder, **options)
        for share, result in zip(SHARES, results, strict=True):
            assert torch.equal(torch.tensor(result["ids"]), by_device), (folder, share)


def ids_of_one_rank(folder: Path, **options) -> torch.Tensor:
    """Of the same engine without the CPU."""
    from zero_inference.kv_cache.device import DeviceKVCache
    from zero_inference.measure.loops import measure_loops

    loaded, spec, ranks = load(folder, batch_size=BATCH, cpu_compute="off", **options)
    ids = random_ids(0, BATCH, PROMPT, VOCAB)
    found = measure_loops(loaded, ids, GEN, 1, 0, ranks, lambda: DeviceKVCache(spec.config, PROMPT + GEN))
    loaded.close()
    return found.output_ids


def test_what_the_cpu_multiplies_is_in_memory_once_and_nothing_of_it_is_left(checkpoints, two_ranks):
    cases = [{"folder": checkpoints("llama"), "cpu_compute": share} for share in ("0.5", "1", "off")]
    before = sorted(path.name for path in Path("/dev/shm").iterdir())
    for rank_results in zip(*two_ranks(GENERATE, cases), strict=True):
        shared = rank_results[0]["shared"]
        assert sum(result["private"] for result in rank_results) == rank_results[0]["host_bytes"] - shared
        if not shared:
            assert rank_results[0]["mapped"] == []
            continue
        blocks = [max(result["mapped"]) for result in rank_results]  # the other mapping is where they meet the CPU
        assert all(size >= shared for size, _ in blocks)
        there = sum(part for _, part in blocks)
        assert 0.9 * shared < there < shared + (1 << 16), "each rank has a half of it to its name"
        assert not any("memfd" in name for result in rank_results for name in result["left"])
    assert sorted(path.name for path in Path("/dev/shm").iterdir()) == before


def test_passes_that_differ_between_ranks_are_fetched(checkpoints, two_ranks):
    """As when ranks score texts of different lengths: the CPU multiplies in the passes that are as short on both."""
    lengths = [[3, 5], [2, 2], [2, 1], [1, 12], [1, 1], [12, 1], [2, 2]]
    folder = checkpoints("llama")
    found = two_ranks(PASSES, [{"folder": folder, "cpu_compute": "0.7", "lengths": lengths}])
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for rank, results in enumerate(found):
        for turn, result in enumerate(results):
            with torch.no_grad():
                expected = plain(torch.tensor(result["ids"]), use_cache=False).logits
            torch.testing.assert_close(torch.tensor(result["logits"]), expected, atol=1e-4, rtol=1e-4)
            by_cores = rank == 0 and lengths[turn][0] == lengths[turn][1]
            assert bool(result["cpu_bytes"]) == by_cores, (rank, turn)


@pytest.mark.parametrize("kv", [[], ["--kv-offload"]])
def test_record_and_output_add_up_over_ranks(kv, checkpoints, run_model):
    options = ["--engine", "stream", "--cpu-compute", "0.6", "--cpu-threads", "2", *kv]
    lengths = ["--batch-size", "4", "--prompt-len", "9", "--gen-len", "4", "--loops", "1", "--dtype", "float32"]
    done = run_model("--model", checkpoints("llama"), *options, *lengths, launcher="by hand", ranks=2, on_cpu=True)
    assert done.code == 0, done.stderr
    assert "threads: 2" in done.stderr and "in host memory for 2 ranks" in done.stderr
    assert ("the CPU backend does not compute attention: several ranks, each with" in done.stderr) == bool(kv)
    stream, moved = done.record["stream"], done.record["transfers"]
    assert stream["cores"]["threads"] == 2 and stream["cores"]["rows"] == 2 and not stream["cores"]["attends"]
    assert moved["cores_bytes_per_step"] == stream["computed_bytes"] > 0
    assert moved["host_to_device_bytes_per_step"] >= stream["fetched_bytes"] > 0
    plain = run_model("--model", checkpoints("llama"), "--engine", "resident", *lengths)
    assert done.record["output_ids_sha256"] == plain.record["output_ids_sha256"]


def test_memory_that_is_refused_to_one_rank_is_an_error_of_both(two_ranks):
    for found in two_ranks(REFUSED, []):
        by_system, to_second, there = found
        assert "host memory was asked for and refused" in by_system
        assert "1 GiB of host memory was asked for and refused (Cannot allocate memory)" in to_second
        assert there == [1, 2, 0], "and the next one is shared"


def test_ranks_of_several_hosts_have_no_memory_in_common(checkpoints, monkeypatch, no_gpu, capfd):
    where = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    for name, value in (where | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}).items():
        monkeypatch.setenv(name, value)
    sizes = ["--dtype", "float32", "--batch-size", "2", "--prompt-len", "8", "--gen-len", "2"]
    asked = ["run_model.py", "--model", str(checkpoints("llama")), "--engine", "stream", *sizes, "--dry-run"]
    assert main([*asked, "--cpu-compute", "0.5"]) == 2
    assert "--cpu-compute 0.5: the ranks are on 2 hosts" in capfd.readouterr().err
    assert main(asked) == 0
    assert "PyTorch computes all layers: the ranks are on several hosts" in capfd.readouterr().out
