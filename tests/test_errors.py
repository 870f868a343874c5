"""Bad input ends with the right exit code, one or two lines, and nothing half-written."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import transformers
from conftest import ROOT, free_port, launch_words, too_few_gpus, without_gpus

from zero_inference.cli import main
from zero_inference.engines import accelerate
from zero_inference.errors import RunError
from zero_inference.utils.patching import Patches

SHORT = ["--prompt-len", "8", "--gen-len", "4", "--loops", "1", "--warmup", "0", "--dtype", "float32"]


@pytest.fixture
def refused(tmp_path, capfd, monkeypatch):
    """refused(*options) -> the message of a run that ends with `code` and writes `records` records."""
    monkeypatch.chdir(tmp_path)

    def start(*options, code=2, records=0) -> str:
        try:
            ended = main(["run_model.py", *SHORT, "--log-dir", "logs", *map(str, options)])
        except SystemExit as stop:  # of the parser
            ended = stop.code
        assert ended == code
        error = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error: ")]
        assert len(error) == 1 and "Traceback" not in error[0]
        written = [line for file in (tmp_path / "logs").glob("*.jsonl") for line in file.read_text().splitlines()]
        assert len(written) == records
        assert not list(tmp_path.rglob("*.log"))
        return error[0]

    return start


CANNOT_WORK = {
    "--cpu-offload --disk-offload": "keep one",
    "--engine stream --ring-depth 1": "--ring-depth 1: must be at least 2",
    "--trace nowhere/trace.json": "nowhere/trace.json cannot be written",
    "--use-gds": "--disk-offload",
    "--kv-offload --async-kv-offload": "--pin-kv-cache",
    "--offload-dir elsewhere": "--disk-offload",
    "--quant-group-size 32": "--quant-bits 8 or 4",
    "--log-file run.log --log-dir elsewhere": "keep one",
    "--engine resident --cpu-offload": "--engine deepspeed",
    "--engine resident --quant-bits 4": "--engine deepspeed",
    "--engine accelerate": "--cpu-offload",
    "--pin-memory 1": "--cpu-offload",
    "--trace=": "--trace is empty",
    "--trace ~/trace.json": "--trace ~/trace.json: this ~ is not expanded to a home folder; write it out",
    "--disk-offload --offload-dir ~nobody-of-this-name/x": "write it out",
    "--prompts nowhere.txt": "one prompt a line",
    "--engine stream --gpu-memory=nan": "must be at ",
    "--engine stream --gpu-memory=1e400": "must be at ",
    "--engine stream --gpu-memory=-1": "must be at ",
    "--quant-bits 4 --quant-group-size 3": "--quant-group-size 3: two 4-bit weights share a byte, so it must be even",
    "--warmup 5 --warmup-spread nan": "--warmup-spread nan",
    "--seed=-1": "--seed -1: must be at least 0",
    f"--batch-size {2**70}": "must be at most",
}


@pytest.mark.parametrize("options, words", CANNOT_WORK.items())
def test_choices_that_cannot_work(refused, options, words):
    assert words in refused("--model", "opt-125m", *options.split())


@pytest.mark.parametrize("same", ["run.log", "run.jsonl", "link", "hard link"])
def test_a_trace_is_never_the_log_or_the_record(refused, tmp_path, same):
    (tmp_path / "run.jsonl").write_text("kept\n")
    (tmp_path / "link").symlink_to(tmp_path / "run.jsonl")
    (tmp_path / "hard link").hardlink_to(tmp_path / "run.jsonl")
    message = refused("--model", "opt-125m", "--dummy", "--log-file", tmp_path / "run.log", "--trace", tmp_path / same)
    assert f"--trace {tmp_path / same} is already used by" in message
    assert (tmp_path / "run.jsonl").read_text() == "kept\n"


@pytest.mark.parametrize(
    "option, name",
    [
        ("--trace", "config.json"),
        ("--log-file", "ds.json"),
        ("--trace", "mine.jsonl"),
        ("--trace", "prompts.jsonl"),
    ],
)
def test_what_a_run_reads_or_others_measured_is_never_written_over(refused, tmp_path, checkpoints, option, name):
    """It was: a trace took the place of the weights, and of another run's record."""
    folder = tmp_path / "model"
    shutil.copytree(checkpoints("llama"), folder)
    (folder / "new").mkdir()
    (folder / "link").symlink_to("config.json")
    (folder / "ds.json").write_text("{}")
    (folder / "mine.jsonl").write_text('{"schema_version": 1, "status": "ok"}\n')
    (folder / "mine.txt").write_text("model size: 1.000 GB\n")
    (folder / name).touch()
    before = {file: file.read_bytes() for file in folder.iterdir() if file.is_file()}
    config = {"ds.json": ["--ds-config", folder / name], "prompts.jsonl": ["--prompts", folder / name]}.get(
        name, ["--engine", "resident"]
    )
    message = refused("--model", folder, *config, option, folder / name)
    assert (
        f"{name} {'is read for' if 'mine' not in name else 'cannot be written (it holds what runs have measured)'}"
        in message
    )
    assert {file: file.read_bytes() for file in folder.iterdir() if file.is_file()} == before


def test_a_current_folder_that_was_removed(tmp_path, monkeypatch, capfd):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert main(["run_model.py", "--model", "opt-125m", "--dummy"]) == 2
    assert capfd.readouterr().err == "error: the current folder was removed; change to one that is there.\n"


@pytest.mark.parametrize(
    "words, unknown, said",
    [(1000, "[UNK]", "the model knows 320 tokens"), (0, None, "cannot encode the prompts")],
    ids=["too many", "none"],
)
def test_a_tokenizer_of_another_model(refused, checkpoints, tmp_path, words, unknown, said):
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder = shutil.copytree(checkpoints("llama"), tmp_path / "model")
    tokenizer = Tokenizer(
        models.WordLevel({str(word): word for word in range(words)} | {unknown or "x": words}, unk_token=unknown)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    message = refused("--model", folder, "--engine", "resident")
    assert said in message and "remove them" in message


def test_a_model_that_is_larger_than_any_memory_is_refused_before_it_is_made(refused):
    message = refused("--model", "llama-3.1-405b", "--dummy", "--engine", "resident")
    assert "llama-3.1-405b: its weights and their buffers need 1512 GiB of " in message and " GiB free); " in message


def test_more_tokens_than_memory_are_refused_before_they_are_made(refused):
    for option, value in (("--batch-size", 2**31 - 1), ("--prompt-len", 2**31 - 1)):
        message = refused("--model", "bloom-560m", "--dummy", option, value)
        assert "tokens need " in message and "GiB" in message


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"RANK": "abc"}, "RANK='abc'"),
        ({"RANK": "1"}, "RANK='1'"),
        ({"WORLD_SIZE": "2", "MASTER_ADDR": ""}, "MASTER_ADDR is not set"),
        ({"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": ""}, "MASTER_PORT=''"),
        ({"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "x"}, "MASTER_PORT='x'"),
    ],
)
def test_damaged_launcher_variables(refused, monkeypatch, changes, words):
    monkeypatch.setattr("zero_inference.cli.FIRST_RANK_SPEAKS_S", 0)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "LOCAL_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in changes.items():
        monkeypatch.setenv(name, value)
    message = refused("--model", "opt-125m", "--dummy")
    assert words in message and "deepspeed or torchrun" in message


@pytest.mark.parametrize("size, value", [("hidden_size", -64), ("vocab_size", 2**70), ("num_attention_heads", "many")])
def test_sizes_that_no_model_has(refused, tmp_path, size, value):
    config = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    config |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 320, "max_position_embeddings": 128}
    (tmp_path / "config.json").write_text(json.dumps(config | {size: value}))
    assert str(tmp_path) in refused("--model", tmp_path, "--dummy")


def test_output_that_has_nowhere_to_go(tmp_path):
    program = (
        "import os\nfrom zero_inference.cli import main\ncode = main(['run_model.py', '--use-gds'])\n"
        "print('\\u00e9\\u65e5', code, flush=True)\n"
        "assert os.open('file', os.O_CREAT) > 2"
    )
    complaint = "error: --use-gds belongs to --disk-offload, which was not given: add that or drop --use-gds.\n"
    for shell, out, err in (
        ('exec "$@"', "\\xe9\\u65e5 2\n", complaint),
        ('exec "$@" >&-', "", complaint),
        ('exec "$@" <&- >&- 2>&-', "", ""),
    ):
        done = subprocess.run(
            ["bash", "-c", shell, "bash", sys.executable, "-c", program],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env={**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONPATH": str(ROOT)},
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, out, err)


@pytest.mark.parametrize("kind", ["mamba", "openai-gpt"])
def test_kv_offload_of_a_model_that_takes_no_cache(refused, tmp_path, kind):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": kind}))
    message = refused("--model", tmp_path / "model", "--dummy", "--kv-offload", "--cpu-offload", "--prompt-len", "8")
    assert f"--kv-offload keeps keys and values in host memory, and {kind} takes no past_key_values: drop" in message


@pytest.mark.parametrize(
    "options, words",
    [
        ("--model facebook/opt-66b", ["--dummy"]),
        ("--model lama2-70b --dummy", ["lama2-70b", "llama2-70b"]),
        ("--model FOLDER", ["config.json"]),
        ("--model opt-125m --norm-kernels cuda", ["no CUDA device", "auto or off"]),
        ("--model LLAMA --prompt-len 120 --gen-len 20", ["140 positions", "128"]),
        ("--model smollm2-135m --batch-size 3 --prompts FOLDER/prompts.txt", ["2 prompts"]),
        ("--model OPT --prompts FOLDER/prompts.txt", ["tokenizer"]),
        ("--model OPT --disk-offload --offload-dir FOLDER/prompts.txt", ["not writable"]),
    ],
)
def test_what_the_model_or_the_files_do_not_allow(
    refused, options, words, checkpoints, smollm2_folder, no_gpu, tmp_path
):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "prompts.txt").write_text("one\n\ntwo\n")
    places = {"FOLDER": tmp_path / "folder", "LLAMA": checkpoints("llama"), "OPT": checkpoints("opt")}
    for name, place in places.items():
        options = options.replace(name, str(place))
    message = refused(*options.split())
    assert all(word in message for word in words), message


def test_group_size_that_does_not_divide(refused, checkpoints):
    message = refused("--model", checkpoints("llama"), "--quant-bits", 4, "--quant-group-size", 48)
    assert "48" in message and "[320, 64]" in message and "64" in message.split("use --quant-group-size")[1]


def test_offload_folder_that_is_too_small(refused, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    message = refused("--model", "opt-125m", "--dummy", "--disk-offload", "--offload-dir", tmp_path / "small")
    assert "needed" in message and "free" in message


def test_missing_libaio(refused, checkpoints, tmp_path, monkeypatch):
    monkeypatch.setenv("CC", "/bin/false")  # nothing can be compiled, so neither can the probe for libaio
    monkeypatch.setenv("CFLAGS", "-nostdinc")
    message = refused("--model", checkpoints("opt"), "--disk-offload", "--offload-dir", tmp_path / "offload")
    assert "libaio-dev" in message


@pytest.mark.parametrize(
    "content, words",
    [
        ("{", "not JSON"),
        ("[]", "object"),
        ('{"zero_optimization": {"stage": 2}}', "stage 3"),
        ('{"zero_optimization": {"stage3_max_live_parameters": "many"}}', "a number is needed"),
        ('{"zero_optimization": {"stage3_param_persistence_threshold": "1"}}', "a number is needed"),
        ('{"zero_optimization": {"unheard_of": 1}}', "DeepSpeed rejects"),
        ('{"zero_optimization": {"offload_param": {"nvme_path": "/data"}}}', "--offload-dir"),
        ('{"fp16": {"enabled": true}}', "--dtype"),
        ('{"bf16": {"enabled": "auto"}}', "--dtype"),
        pytest.param("[" * 100_000, "not JSON", id="deep"),
        ('{"optimizer": {"type": "Adam"}}', "is for training; remove it"),
    ],
)
def test_a_bad_ds_config(refused, checkpoints, tmp_path, content, words):
    (tmp_path / "ds.json").write_text(content)
    assert words in refused("--model", checkpoints("opt"), "--cpu-offload", "--ds-config", tmp_path / "ds.json")


def test_a_good_ds_config_has_the_last_word(checkpoints, tmp_path):
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage3_prefetch_bucket_size": 12345}}')
    files = ["--ds-config", str(tmp_path / "ds.json"), "--log-file", str(tmp_path / "run.log")]
    assert main(["run_model.py", *SHORT, "--model", str(checkpoints("opt")), "--cpu-offload", *files]) == 0
    zero = json.loads((tmp_path / "run.jsonl").read_text())["ds_config"]["zero_optimization"]
    assert zero["stage3_prefetch_bucket_size"] == 12345 and zero["offload_param"]["device"] == "cpu"


@pytest.mark.parametrize("damage", ["cut", "header", "missing tensor", "missing shard"])
def test_a_damaged_shard_fails_the_run_and_leaves_a_failed_record(refused, checkpoints, tmp_path, damage):
    folder = shutil.copytree(checkpoints("llama"), tmp_path / "model")
    shard = sorted(folder.glob("model-*.safetensors"))[1]
    if damage == "cut":
        os.truncate(shard, shard.stat().st_size - 100)
    elif damage == "header":
        shard.write_bytes(b"\xff" * 64)
    elif damage == "missing shard":
        shard.unlink()
    else:
        from safetensors.torch import load_file, save_file

        tensors = load_file(shard)
        tensors.popitem()
        save_file(tensors, shard)
    message = refused("--model", folder, "--cpu-offload", code=1, records=1)
    assert str(folder) in message
    record = json.loads(next((tmp_path / "logs").glob("*.jsonl")).read_text())
    assert record["status"] == "failed" and record["error"] in message and record["loops"] is None


def test_out_of_device_memory(refused, checkpoints, monkeypatch):
    """What PyTorch says, as far as it helps."""

    def full(*args, **kwargs):
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 79.11 GiB of which 397.12 MiB is free. "
            "Including non-PyTorch memory, this process has 78.71 GiB memory in use. Of the allocated memory 76.30 GiB is allocated by "
            "PyTorch, and 1.55 GiB is reserved by PyTorch but unallocated. If reserved but unallocated memory is large, try something."
        )

    monkeypatch.setattr(transformers.GenerationMixin, "generate", full)
    message = refused("--model", checkpoints("opt"), "--cpu-offload", code=1, records=1)
    assert "--batch-size" in message and "--kv-offload" in message and "20.00 GiB" in message
    assert "397.12 MiB is free. PyTorch held 1.55 GiB more that it could not use for this.)" in message


def test_out_of_memory_in_a_real_process(checkpoints, run_model):
    # on the CPU: a CUDA context maps more than any such limit
    done = run_model(
        "--model",
        checkpoints("opt"),
        *"--dtype float32 --batch-size 40000 --prompt-len 64 --gen-len 2 --engine resident".split(),
        on_cpu=True,
        memory_bytes=2 << 30,
    )
    assert done.code == 1 and "Traceback" not in done.stderr, done.stderr
    assert "--batch-size" in done.stderr and done.record["status"] == "failed"


def test_a_batch_that_does_not_divide_over_the_ranks(checkpoints, run_model):
    done = run_model("--model", checkpoints("opt"), *SHORT, "--batch-size", 3, launcher="by hand", ranks=2)
    assert done.code == 2 and done.record is None
    assert "--batch-size 3 does not divide over 2 ranks" in done.stderr


@pytest.mark.slow
def test_a_failure_of_one_rank_alone_leaves_one_record(checkpoints, tmp_path):
    """Rank 1 runs out of memory in its loop; the first rank waits for it in a collective and never fails itself."""
    program = tmp_path / "one_rank_fails.py"
    program.write_text(
        "import os, sys, torch, transformers\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        "from zero_inference.cli import main\n"
        "def full(*args, **kwargs):\n"
        "    raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 20.00 GiB.')\n"
        "if os.environ['RANK'] == '1':\n"
        "    transformers.GenerationMixin.generate = full\n"
        "os._exit(main())\n"
    )
    command = [*launch_words("torchrun", 2, free_port()), program]
    options = [*SHORT, "--model", checkpoints("opt"), *"--batch-size 2 --cpu-offload --log-file".split()]
    done = subprocess.run(
        [str(word) for word in (*command, *options, tmp_path / "run.log")],
        capture_output=True,
        text=True,
        timeout=240,
        env=without_gpus() if too_few_gpus(2) else None,
    )
    assert done.returncode != 0 and "20.00 GiB" in done.stderr
    records = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    assert [record["status"] for record in records] == ["failed"] and "rank 1" in records[0]["error"]


@pytest.mark.parametrize(
    "read", [lambda weight, states: states + weight, lambda weight, states: states * weight.sum().item()]
)
def test_a_weight_that_accelerate_has_not_brought_is_told_from_other_errors(read):
    class Model(torch.nn.Module):
        config = SimpleNamespace(model_type="odd")

        def forward(self, error=None):
            if error is not None:
                raise error
            return read(torch.empty(4, device="meta"), torch.zeros(2, 4))

    model = Model()
    accelerate._explain_missing_weights(model, Patches())
    with pytest.raises(RunError, match="odd reads a weight without calling its module"):
        model()
    with pytest.raises(RuntimeError, match="^metadata of the file is damaged$"):
        model(RuntimeError("metadata of the file is damaged"))
