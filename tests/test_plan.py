"""A run is planned once: one model without weights, and one decision that loading, --dry-run and the record all follow."""

import json
from dataclasses import replace

import pytest
import torch
import transformers
from conftest import FAMILIES

from zero_inference.architectures.command import Arm, check_arm
from zero_inference.cli import main
from zero_inference.config.options import FIELD_NAMES
from zero_inference.config.run_config import RunConfig
from zero_inference.engines.stream.plan import RESERVE_BYTES
from zero_inference.errors import ONLY_PLANNED, DoesNotFit, UsageError
from zero_inference.hardware import machine
from zero_inference.models.spec import resolve_model
from zero_inference.planning.changes import check_memory
from zero_inference.planning.make_plan import make_plan, plan_run
from zero_inference.planning.plan import build_job
from zero_inference.records.read import read_records
from zero_inference.utils.format import format_bytes
from zero_inference.utils.ranks import Ranks, detect_ranks, start_process_group

JSON_KEYS = [
    "fits", "verdict", "config", "sizes", "needs", "refused", "predicted", "limit", "moved_per_step", "gpus", "draft",
    "placement", "changes_that_fit", "faster", "machine",
]  # fmt: skip
SHORT = ["--prompt-len", "7", "--gen-len", "3", "--loops", "1", "--warmup", "0", "--dtype", "float32"]
ENGINES = {
    "deepspeed": ["--cpu-offload", "--quant-bits", "8"],
    "stream": ["--quant-bits", "4", "--quant-group-size", "32"],
    "accelerate": ["--cpu-offload"],
    "resident": [],
}


@pytest.fixture
def built(monkeypatch) -> list[str]:
    """Families of the models that were built since."""
    made, build = [], transformers.AutoModelForCausalLM.from_config

    def counted(config, **options):
        made.append(config.model_type)
        return build(config, **options)

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_config", counted)
    return made


@pytest.mark.parametrize("engine", ENGINES)
def test_a_run_builds_its_model_once(engine, built, checkpoints, tmp_path):
    folder = checkpoints("llama")
    built.clear()
    options = ["--engine", engine, *ENGINES[engine], *SHORT, "--log-file", str(tmp_path / "run.log")]
    assert main(["run_model.py", "--model", str(folder), *options]) == 0
    assert built == ["llama"], "the record's model_bytes of a llama is an exact count too"


def test_a_plan_that_tries_many_changes_builds_its_model_once(built, capfd):
    asked = "--model meta-llama/Llama-2-70b-hf --dummy --dry-run --engine resident --batch-size 4096".split()
    assert main(["run_model.py", *asked]) == 2
    assert "It does not fit." in capfd.readouterr().out and built == ["llama"]


def plan_for(folder, **options):
    config = RunConfig(model=str(folder), dtype="float32", batch_size=2, prompt_len=7, gen_len=3, **options).validate()
    return make_plan(build_job(config, resolve_model(config, "cpu"), detect_ranks()))


@pytest.mark.parametrize("bits", [16, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_what_the_stream_engine_stores_and_moves_is_what_was_planned(family, bits, checkpoints, tmp_path, no_gpu):
    weights = plan_for(checkpoints(family), engine="stream", quant_bits=bits, cpu_compute="off").engine_plan
    options = ["--engine", "stream", "--cpu-compute", "off", "--quant-bits", str(bits), "--batch-size", "2", *SHORT]
    assert (
        main(["run_model.py", "--model", str(checkpoints(family)), *options, "--log-file", str(tmp_path / "a.log")])
        == 0
    )
    record = read_records(tmp_path / "a.jsonl")[-1]
    assert record["weight_bytes"] == weights.placement.stored_bytes
    assert record["transfers"]["host_to_device_bytes_per_step"] == weights.footprint.host
    assert (
        record["stream"]["streamed_layers"]
        == len(weights.placement.in_host_memory)
        == FAMILIES[family].get("n_layer", 3)
    )


def test_the_same_numbers_are_in_the_dry_run_and_in_the_record(checkpoints, tmp_path, capfd):
    asked = ["run_model.py", "--model", str(checkpoints("qwen3")), "--engine", "stream", *SHORT]
    capfd.readouterr()  # libraries may have said something while the checkpoint was made
    assert main([*asked, "--dry-run"]) == 0
    printed = capfd.readouterr().out
    assert main([*asked, "--dry-run", "--json"]) == 0
    planned = json.loads(capfd.readouterr().out)
    assert main([*asked, "--log-file", str(tmp_path / "run.log")]) == 0
    record = read_records(tmp_path / "run.jsonl")[-1]
    assert planned["fits"] is True and planned["verdict"] == printed.splitlines()[0]
    for key in ("model_bytes", "cache_bytes", "hidden_bytes", "weight_bytes"):
        assert planned["sizes"][key] == record[key], key
    assert f"{format_bytes(record['cache_bytes'])} in host memory" in printed
    assert f"  weights        {format_bytes(record['weight_bytes'])} in float32" in printed
    for key in ("pin_memory", "model_type", "dtype", "world_size", "batch_size"):
        assert planned["config"][key] == record[key], key
    for key in ("host_to_device_bytes_per_step", "disk_read_bytes_per_step"):
        assert planned["moved_per_step"][key] == record["predicted"][key], key


def test_a_dry_run_shows_what_differs_from_the_defaults_and_all_of_it_as_json(capfd, no_gpu):
    options = "--model opt-125m --engine stream --quant-bits 4 --dummy --gpu-memory 0.5"
    asked = f"run_model.py {options} --dry-run"
    assert main(asked.split()) == 0
    assert f"\n  options        {options}\n" in capfd.readouterr().out
    assert main([*asked.split(), "--json"]) == 0
    answer = json.loads(capfd.readouterr().out)
    assert list(answer) == JSON_KEYS, "as documented in planning/output.py"
    assert set(answer["config"]) == {*FIELD_NAMES, "model_type", "world_size"}
    assert [need["place"] for need in answer["needs"]] == ["host memory"] and answer["changes_that_fit"] == []
    assert all(need["needed_bytes"] <= need["available_bytes"] for need in answer["needs"])


def test_json_says_where_it_does_not_fit_and_what_would(capfd, presets_built_once):
    asked = "run_model.py --model opt-30b --dummy --dry-run --json --machine rtx4090 --engine"
    assert main([*asked.split(), "resident"]) == 2
    out, err = capfd.readouterr()
    answer = json.loads(out)
    assert answer["fits"] is False and [need["fits"] for need in answer["needs"]] == [False, True, True]
    assert answer["changes_that_fit"] and answer["verdict"].startswith("It does not fit. It needs ")
    assert answer["changes_that_fit"][0] in answer["verdict"] and err.startswith(
        "error: --dry-run: opt-30b does not fit"
    )
    assert answer["machine"]["source"] == "datasheet" and answer["machine"]["is_here"] is False
    assert main([*asked.split(), "stream", "--gpu-memory", "40"]) == 2
    answer = json.loads(capfd.readouterr().out)
    assert (
        answer["needs"] is None and "use --gpu-memory" in answer["refused"] and answer["refused"] in answer["verdict"]
    )


def test_json_of_a_described_machine_has_times_and_their_limits(capfd):
    asked = "run_model.py --model llama-2-13b --dummy --engine stream --dry-run --json --batch-size 4 --machine rtx4090"
    assert main(asked.split()) == 0
    answer = json.loads(capfd.readouterr().out)
    predicted = answer["predicted"]
    assert (
        predicted["decode_throughput"] == pytest.approx(4 / predicted["decode_step_s"]) and predicted["prefill_s"] > 0
    )
    assert predicted["bound_by"] == answer["limit"]["bound_by"] == "link"
    assert answer["limit"]["decode_step_s"] <= predicted["decode_step_s"] * 1.001
    assert predicted["bounds_because"] and len(predicted["left_out"]) == 2 and predicted["unknown_because"] is None


def test_what_stays_on_the_device_is_decided_by_its_free_memory(no_gpu):
    config = RunConfig(model="opt-13b", dummy=True, engine="stream").validate()
    job = build_job(config, resolve_model(config, "cpu"), detect_ranks())
    tight = make_plan(replace(job, free_by_device=(12 << 30,)))
    assert tight.engine_plan.placement.resident and tight.engine_plan.placement.in_host_memory
    kept = tight.engine_plan.footprint.device + tight.job.kv_device_bytes + 1.5 * tight.job.activation_bytes
    assert 11 << 30 < kept + RESERVE_BYTES <= 12 << 30, "half of the activations is left for the allocator"
    why = r"do not fit into the 0 bytes of device memory left for them by embedding and head .* KV cache .* of 2 GiB free\.$"
    with pytest.raises(DoesNotFit, match=why):
        make_plan(replace(job, free_by_device=(2 << 30,)))


@pytest.mark.parametrize(
    "options, zero",
    [
        ({"cpu_offload": True}, {}),
        ({"disk_offload": True}, {}),
        ({"disk_offload": True, "quant_bits": 8}, {}),  # some partitions are too small for DeepSpeed to write
        ({"disk_offload": True}, {"stage3_param_persistence_threshold": 10**9}),
        ({}, {}),
    ],
    ids=["host", "disk", "disk-int8", "disk-persistent", "device"],
)
def test_deepspeed_keeps_each_partition_where_it_was_planned(options, zero, tmp_path):
    from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum

    if zero:
        (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": zero}))
        options = options | {"ds_config": str(tmp_path / "ds.json")}
    if "disk_offload" in options:
        options = options | {"offload_dir": str(tmp_path / "offload")}
    config = RunConfig(model="opt-125m", dummy=True, dtype="bfloat16", **options).validate()
    ranks = detect_ranks()
    start_process_group(ranks)
    plan = plan_run(config, resolve_model(config, ranks.device.type), ranks)
    loaded = plan.load()
    try:
        found = dict.fromkeys(("memory", "nvme"), 0)
        for parameter in loaded.model.parameters():
            place = "nvme" if parameter.ds_tensor.final_location == OffloadDeviceEnum.nvme else "memory"
            found[place] += parameter.ds_tensor.ds_numel * parameter.element_size()
    finally:
        loaded.close()
    planned = plan.engine_plan.footprint
    offload = plan.engine_plan.ds_config["zero_optimization"].get("offload_param", {})
    buffers = offload.get("buffer_size", 0) * offload.get("buffer_count", 0) * 2
    in_memory = planned.host - buffers + planned.device - planned.gathered
    assert found["nvme"] == planned.disk and (found["nvme"] > 0) == ("disk_offload" in options)
    # vectors stay on the device, and are counted with what is gathered
    assert found["memory"] == pytest.approx(in_memory, rel=0.01) and found["memory"] >= in_memory


@pytest.fixture
def large_host(no_gpu, monkeypatch):
    """A machine of 100 GiB, whatever this one has, for which DeepSpeed is asked too."""
    monkeypatch.setattr(machine, "available_host_bytes", lambda: 100 << 30)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    for name, value in (("DS_ACCELERATOR", "cpu"), ("TORCH_CUDA_ARCH_LIST", "")):
        monkeypatch.setenv(name, value)


def on_a_gpu(free_device_bytes: int, **options):
    config = RunConfig(dummy=True, dtype="bfloat16", **options).validate()
    ranks = Ranks(**{**vars(detect_ranks()), "device": torch.device("cuda")})
    return make_plan(replace(describe_job_without_memory(config, ranks), free_by_device=(free_device_bytes,)))


# opt-13b has 23.9 GiB of weights and 0.78 MiB of keys and values a token
@pytest.mark.parametrize(
    "engine, batch, said",
    [
        ("resident", 1, "its weights and their buffers need 23.9 GiB of device memory"),
        ("resident", 16, "its weights and their buffers need 23.9 GiB of device memory"),
        ("accelerate", 16, "the KV cache and ids of 16 x 2032 tokens need 24.8 GiB of device memory"),
        ("accelerate", 12, "its weights, the KV cache and ids of 12 x 2032 tokens need 19.1 GiB of device memory"),
    ],
)
def test_what_the_device_cannot_hold_for_certain_is_refused(engine, batch, said, large_host):
    asked = dict(model="opt-13b", prompt_len=2000, gen_len=32, cpu_offload=engine == "accelerate")
    with pytest.raises(UsageError) as refusal:
        check_memory(on_a_gpu(int(18.7 * 2**30), engine=engine, batch_size=batch, **asked))
    message = str(refusal.value)
    assert said in message and " (18.7 GiB free); " in message and "use one of: " in message


def test_what_is_only_estimated_is_not_refused(large_host, tmp_path):
    """Gathered layers and activations are upper bounds, and transformers' own cache keeps only the window."""
    plan = on_a_gpu(2 << 30, model="opt-13b", engine="accelerate", cpu_offload=True, prompt_len=512)
    check_memory(plan)
    gathered = replace(plan.engine_plan.footprint, device=3 << 30, gathered=3 << 30)
    check_memory(replace(plan, engine_plan=replace(plan.engine_plan, footprint=gathered)))
    with pytest.raises(UsageError, match="its weights and their buffers need 3 GiB of device memory"):
        check_memory(replace(plan, engine_plan=replace(plan.engine_plan, footprint=replace(gathered, gathered=0))))
    windows = transformers.MistralConfig(num_hidden_layers=4, sliding_window=1000, max_position_embeddings=1 << 20)
    windows.save_pretrained(tmp_path)
    asked = dict(model=str(tmp_path), prompt_len=1 << 19, gen_len=32)
    plan = on_a_gpu(3 << 30, engine="accelerate", cpu_offload=True, **asked)
    assert plan.job.kv_device_bytes > 4 << 30 and not plan.fits
    check_memory(plan)


def test_the_advice_is_what_the_engine_can_do(no_gpu, monkeypatch, presets_built_once):
    """On a CPU, where accelerate uses weights where they are, and a ring has few slots; with no disk."""
    monkeypatch.setattr(machine.Machine, "disk_free_bytes", lambda self, folder: None)

    def refusal(host_mib: int, **options) -> str | None:
        monkeypatch.setattr(machine, "available_host_bytes", lambda: host_mib << 20)
        config = RunConfig(
            dummy=True, dtype="bfloat16", prompt_len=8, gen_len=2, cpu_offload=True, **options
        ).validate()
        try:
            check_memory(make_plan(build_job(config, resolve_model(config, "cpu"), detect_ranks())))
        except UsageError as error:
            return str(error)
        return None

    assert refusal(1200, model="bloom-560m", engine="accelerate") is None, "1067 MiB, of which 490 are the embedding"
    assert refusal(1000, model="bloom-560m", engine="accelerate").endswith(
        "a machine with more memory, or a smaller model."
    )
    assert "use one of: --ring-depth 2; --quant-bits" in refusal(2750, model="opt-1.3b", engine="stream")
    assert refusal(2750, model="opt-1.3b", engine="stream", ring_depth=2) is None
    assert refusal(1000, model="opt-13b", engine="stream", ring_depth=2).endswith(
        "more GPUs, nodes or memory, or a smaller model."
    )


def describe_job_without_memory(config, ranks):
    job = build_job(config, resolve_model(config, "cpu"), detect_ranks())
    return replace(job, ranks=ranks, devices=(ranks.device,))


def test_a_preset_that_cannot_be_fetched_is_planned_and_a_run_of_it_refused(
    no_gpu, capfd, monkeypatch, tmp_path, presets_built_once
):
    """So does somebody who has no access to a gated model yet; `zero-inference compare`, which runs it, refuses it."""
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    asked = "run_model.py llama-3.1-70b --engine stream --quant-bits 4 --machine rtx4090 --dry-run".split()
    assert main(asked) == 0
    printed = capfd.readouterr()
    assert printed.out.startswith("It fits. Predicted: ")
    assert "at most" not in printed.out.splitlines()[0], "the CPU may add speed"
    said = next(line for line in printed.err.splitlines() if line.startswith(ONLY_PLANNED))
    assert "--dummy" in said
    assert main([*asked[:2], "--dry-run"]) in (0, 2) and main(asked[:2]) == 2
    assert "error: --model llama-3.1-70b: its config.json is not in the local cache" in capfd.readouterr().err
    assert main([*asked, "--prompt", "text"]) == 2, "how long it is, only the tokenizer knows"
    arm = Arm("70b", ("--model", "llama-3.1-70b"), RunConfig(model="llama-3.1-70b").validate())
    with pytest.raises(UsageError, match="^arm 70b: --model llama-3.1-70b: its config.json is not in"):
        check_arm(arm, ["--machine", "rtx4090", "--cpu-offload"], tmp_path)  # where it does not fit either
