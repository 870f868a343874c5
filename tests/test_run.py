"""A run from end to end: what is printed, logged and recorded, and what a killed run leaves."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import time

import psutil
import pytest
import torch
from conftest import ROOT, VOCAB, start_python
from forks import PROGRAM

from zero_inference import load, run
from zero_inference.cli import main
from zero_inference.models.prompts import random_ids
from zero_inference.models.weights import draw_tokens, fill_dummy
from zero_inference.records.read import parse_log, read_records
from zero_inference.utils import environment
from zero_inference.utils.format import three_digits

OPTIONS = ["--prompt-len", "12", "--gen-len", "5", "--dtype", "float32"]


def test_log_record_and_output_agree(checkpoints, tmp_path, capfd):
    for _ in range(2):
        more = ["--batch-size", "4", "--cpu-offload", "--loops", "3", "--log-dir", str(tmp_path)]
        assert main(["run_model.py", "--model", str(checkpoints("qwen3")), *OPTIONS, *more]) == 0
    out = capfd.readouterr().out
    log = tmp_path / "ds-qwen3-bs4-prompt12-gen5-n1x1-cpu.log"
    blocks, records = parse_log(log), read_records(log.with_suffix(".jsonl"))
    assert len(blocks) == len(records) == 2
    record = records[-1]
    assert f" {three_digits(record['decode_throughput'])}" in out and "decode (4 steps)" in out
    assert blocks[-1]["decode_latency_s"] == pytest.approx(record["decode_latency_s"], abs=5e-4)
    assert record["prefill_throughput"] == pytest.approx(4 * 12 / record["prefill_latency_s"])
    assert record["decode_throughput"] == pytest.approx(4 * 4 / record["decode_latency_s"])
    assert record["total_throughput"] == pytest.approx(4 * 5 / record["total_latency_s"])
    for loop in record["loops"]:
        assert loop["total_s"] == pytest.approx(loop["prefill_s"] + loop["decode_s"])
        assert sum(loop["step_s"]) == pytest.approx(loop["decode_s"])
    assert sorted(loop["total_s"] for loop in record["loops"])[1] == record["total_latency_s"]
    assert record["cold_total_s"] > 0 and record["load_s"] > 0 and record["limit"]["link_gbps"] > 0
    assert not torch.backends.cuda.cudnn_sdp_enabled(), "cuDNN's attention changes tokens from run to run"
    # a wheel's metadata may lack the build (+cu130) that torch itself names
    assert record["environment"]["packages"]["torch"].split("+")[0] == torch.__version__.split("+")[0]


def test_disk_reads_are_the_layers(checkpoints, tmp_path):
    big = tmp_path / "big"  # a parameter under a block of 1 MiB is not swapped, so this one needs large matrices
    config = {"model_type": "llama", "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 2}
    config |= {"num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": VOCAB, "max_position_embeddings": 64}
    big.mkdir()
    (big / "config.json").write_text(json.dumps(config))
    files = ["--offload-dir", str(tmp_path / "offload"), "--log-file", str(tmp_path / "run.log")]
    assert main(["run_model.py", "--model", str(big), "--dummy", *OPTIONS, "--disk-offload", *files]) == 0
    record = json.loads((tmp_path / "run.jsonl").read_text())
    matrices = 2 * 4 * (4 * 512 * 512 + 3 * 512 * 1024)
    assert record["transfers"]["disk_read_bytes_per_step"] == matrices
    try:
        os.close(os.open(big / "config.json", os.O_RDONLY | os.O_DIRECT))
    except OSError as error:
        pytest.skip(f"the file system of {tmp_path} has no direct reads, whose rate bounds a step: {error.strerror}")
    assert record["limit"]["floor_decode_s"] == pytest.approx(4 * matrices / record["limit"]["disk_gbps"] / 1e9)


def test_one_token_has_no_decode(checkpoints, tmp_path):
    options = ["--prompt-len", "8", "--gen-len", "1", "--log-file", str(tmp_path / "run.log")]
    assert main(["run_model.py", "--model", str(checkpoints("opt")), *options]) == 0
    record = json.loads((tmp_path / "run.jsonl").read_text())
    assert record["decode_throughput"] is None and record["loops"][0]["step_s"] == []
    assert "decode throughput: nan token/s" in (tmp_path / "run.log").read_text()


def test_torch_checkpoints_are_read_too(checkpoints, tmp_path):
    """OPT's and BLOOM's large checkpoints on the hub are pytorch_model-*.bin."""
    from safetensors.torch import load_file

    safe, old = checkpoints("opt"), tmp_path / "opt"
    old.mkdir()
    (old / "config.json").write_bytes((safe / "config.json").read_bytes())
    weight_map = {}
    for number, shard in enumerate(sorted(safe.glob("*.safetensors"))):
        tensors = load_file(shard)
        torch.save(tensors, old / f"pytorch_model-{number}.bin")
        weight_map.update(dict.fromkeys(tensors, f"pytorch_model-{number}.bin"))
    (old / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    hashes = []
    for folder in (safe, old):
        log = str(tmp_path / f"{folder.name}.log")
        assert main(["run_model.py", "--model", str(folder), *OPTIONS, "--cpu-offload", "--log-file", log]) == 0
        hashes.append(read_records(tmp_path / f"{folder.name}.jsonl")[-1]["output_ids_sha256"])
    assert hashes[0] == hashes[1]


def test_dummy_weights_depend_on_seed_and_name_alone():
    a, b = (fill_dummy(torch.empty(64, 64), "model.w.weight", 3) for _ in range(2))
    assert torch.equal(a, b)
    assert not torch.equal(a, fill_dummy(torch.empty(64, 64), "model.w.weight", 4))
    assert not torch.equal(a, fill_dummy(torch.empty(64, 64), "model.v.weight", 3))
    assert 0.015 < a.std() < 0.025


MIXTURE = {"model_type": "qwen3_moe", "vocab_size": 2000, "hidden_size": 256, "moe_intermediate_size": 64}
MIXTURE |= {"num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
MIXTURE |= {"num_experts": 32, "num_experts_per_tok": 2, "max_position_embeddings": 512}


def test_dummy_mixtures_use_experts_as_text_does(tmp_path):
    """LRU hits of a quarter of the experts: two thirds with drawn tokens, nearly all with greedy ones."""
    (tmp_path / "config.json").write_text(json.dumps(MIXTURE))
    prompts, lru_hits = random_ids(0, 1, 16, MIXTURE["vocab_size"]), {}
    for routing in ("text", "greedy"):
        options = dict(dummy=True, dummy_routing=routing, dtype="float32", engine="resident", verbose=0)
        with load(str(tmp_path), batch_size=1, max_length=256, **options) as model:
            chosen = [[] for _ in model.model.layers]
            for layer, seen in zip(model.model.layers, chosen):
                layer.mlp.experts.register_forward_pre_hook(lambda module, args, seen=seen: seen.append(args[1]))
            if routing == "text":
                model(draw_tokens(prompts, 160, MIXTURE["vocab_size"], 0))
            else:
                model.generate(prompts, max_new_tokens=160, do_sample=False, pad_token_id=0)
        lru_hits[routing] = [lru_hit_rate(seen, slots=8) for seen in chosen]
    assert all(0.55 < rate < 0.8 for rate in lru_hits["text"]), lru_hits
    assert statistics.mean(lru_hits["greedy"]) > 0.95, lru_hits


def lru_hit_rate(steps, slots: int) -> float:
    kept, hits, choices = [], 0, 0
    for expert in torch.cat(steps).flatten().tolist():
        choices, hits = choices + 1, hits + (expert in kept)
        kept = ([one for one in kept if one != expert] + [expert])[-slots:]
    return hits / choices


def test_drawn_tokens_are_fed_and_the_selected_ones_returned(tmp_path, capfd):
    """By each engine: the ids are the model's own choice after every drawn token."""
    (tmp_path / "config.json").write_text(json.dumps(MIXTURE | {"num_hidden_layers": 2}))
    common = dict(
        model=str(tmp_path), dummy=True, dtype="float32", batch_size=2, prompt_len=9, gen_len=6, loops=1, warmup=0
    )
    runs = {
        engine: run(**common, engine=engine, log_file=str(tmp_path / f"{engine}.log"), verbose=0)
        for engine in ("resident", "stream")
    }
    prompts = random_ids(0, 2, 9, MIXTURE["vocab_size"])
    fed = draw_tokens(prompts, 6, MIXTURE["vocab_size"], 0)
    with load(
        str(tmp_path), dummy=True, dtype="float32", engine="resident", batch_size=2, max_length=32, verbose=0
    ) as model:
        logits = model(torch.cat([prompts, fed], 1)).logits
    expected = logits[:, 8:-1].argmax(-1)
    for finished in runs.values():
        assert torch.equal(finished.output_ids, expected)
        assert finished.record["dummy_routing"] == "text"
    assert not torch.equal(expected, fed)


def test_a_killed_run_keeps_earlier_entries_and_leaves_no_files_behind(checkpoints, fork_server, tmp_path):
    offload, log = tmp_path / "offload", tmp_path / "run.log"
    files = ["--offload-dir", str(offload), "--log-file", str(log)]
    options = ["--model", str(checkpoints("opt")), *OPTIONS, "--disk-offload", *files]
    assert main(["run_model.py", *options, "--loops", "1"]) == 0
    before = log.read_bytes(), log.with_suffix(".jsonl").read_bytes()
    program, said = [ROOT / "run_model.py", *options, "--loops", "100000"], tmp_path / "said"
    process = start_python(fork_server(PROGRAM), program, tmp_path, said, said, dict(os.environ))
    deadline = time.monotonic() + 120
    while not list(offload.glob("*/zero_stage_3/**/rank0")) and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.1)
    assert process.poll() is None, said.read_text()
    process.kill()
    process.wait()
    assert list(offload.iterdir()), said.read_text()
    assert (log.read_bytes(), log.with_suffix(".jsonl").read_bytes()) == before
    assert main(["run_model.py", *options, "--loops", "1"]) == 0
    assert not list(offload.iterdir())
    assert len(read_records(log.with_suffix(".jsonl"))) == 2


def stand_on_a_machine(monkeypatch, host_bytes: int, disk_bytes: int | None = None) -> None:
    """What the system says is free: host memory, under no cgroup's limit, and, where it is given, disk."""
    memory = psutil.virtual_memory()._replace(available=host_bytes)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    monkeypatch.setattr(environment, "cgroup_memory", lambda root="/": (None, None))
    if disk_bytes is not None:
        disk = shutil.disk_usage("/")._replace(free=disk_bytes)
        monkeypatch.setattr(shutil, "disk_usage", lambda path: disk)


def test_two_changes_are_tried_where_no_single_one_fits_and_do_fit_as_printed(
    capfd, monkeypatch, no_gpu, presets_built_once
):
    """Without a GPU, whose free memory would decide too."""
    stand_on_a_machine(monkeypatch, host_bytes=60 << 30, disk_bytes=0)
    asked = ["run_model.py", "--dummy", "--model", "opt-66b", "--cpu-offload", "--batch-size", "64"]
    assert main([*asked, "--dry-run"]) == 2
    advice = capfd.readouterr().out.splitlines()[0].split(" It would fit with ")[1].removesuffix(".")
    pairs = [pair.split() for pair in advice.removeprefix("one of: ").split("; ")]
    cheapest = pairs[0]
    assert cheapest[:3] == ["--quant-bits", "4", "--batch-size"] and len(cheapest) == 4
    assert main([*asked, "--dry-run", *cheapest]) == 0
    assert "It fits." in capfd.readouterr().out
    for half in (cheapest[:2], cheapest[2:], [*cheapest[:3], str(2 * int(cheapest[3]))]):
        assert main([*asked, "--dry-run", *half]) == 2
    capfd.readouterr()
    assert main(asked) == 2  # refused before anything is loaded, with the same advice
    assert f"; use {advice}." in capfd.readouterr().err


def test_an_advice_that_replaces_an_option_says_which(capfd, monkeypatch, no_gpu, presets_built_once):
    """Without a GPU, whose free memory would decide too."""
    stand_on_a_machine(monkeypatch, host_bytes=35 << 30, disk_bytes=1 << 40)
    asked = ["run_model.py", "--dummy", "--dry-run", "--model", "opt-66b"]
    for given, advice in (
        ([], "--disk-offload"),
        (["--cpu-offload"], "--disk-offload instead of --cpu-offload"),
        (["--engine", "resident"], "one of: --engine stream; --engine deepspeed --disk-offload"),
    ):
        assert main([*asked, *given]) == 2
        assert capfd.readouterr().out.splitlines()[0].endswith(f" It would fit with {advice}."), given
    assert main([*asked, "--disk-offload"]) == 0
    capfd.readouterr()
    assert main([*asked, "--engine", "stream"]) == 0, "the rest is on disk"
    assert " and on disk (" in capfd.readouterr().out


@pytest.mark.parametrize("engine, prefix", [("resident", "resident"), ("deepspeed", "ds")])
def test_weights_of_a_run_without_offload_are_on_the_cpu_where_there_is_no_gpu(checkpoints, tmp_path, engine, prefix):
    place = "gpu" if torch.cuda.is_available() else "cpu"
    options = ["--model", str(checkpoints("opt")), "--engine", engine, *OPTIONS]
    assert main(["run_model.py", *options, "--log-dir", str(tmp_path)]) == 0
    log = tmp_path / f"{prefix}-opt-bs1-prompt12-gen5-n1x1-{place}.log"
    record = read_records(log.with_suffix(".jsonl"))[0]
    assert len(parse_log(log)) == 1 and record["weights_place"] == place
    assert record["cpu_offload"] is False, "the request is recorded as it was made"
