"""run, plan and load from Python: the same tokens, logits and scores as plain transformers, and a process left as it was found."""

from __future__ import annotations

import gc
import json
import math
import multiprocessing
import os
import signal
import sys
import threading
import weakref

import pytest
import torch
from conftest import need_lm_eval, plain_ids

from zero_inference import load, plan, run, unload
from zero_inference.cli import console_main
from zero_inference.config.run_config import make_config
from zero_inference.errors import RunError, UsageError
from zero_inference.models.prompts import random_ids
from zero_inference.planning.search import command_of

CPU = {"dtype": "float32", "verbose": 0}
WAYS = {
    "resident": {"engine": "resident"},
    "stream": {"ring_depth": 2},
    "stream, repeated steps": {"decode_graph": "on"},
    "stream, keys in host memory": {"kv_offload": True},
    "stream, cores attend": {"kv_offload": True, "cpu_compute": 1.0},
    "accelerate": {"engine": "accelerate", "cpu_offload": True},
    "accelerate, disk": {"engine": "accelerate", "disk_offload": True},
    "deepspeed": {"engine": "deepspeed", "cpu_offload": True},
    "deepspeed, disk": {"engine": "deepspeed", "disk_offload": True},
}
TEXTS = ["The river was low that year, and the boats lay on the mud.", "Bread needs flour, water, salt and patience."]


# DeepSpeed decides when it is imported what it runs on; see test_api_cuda.py for what it does there.
deepspeed_on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="DeepSpeed uses the GPU: CUDA_VISIBLE_DEVICES=")


@pytest.fixture(autouse=True)
def on_cpu(no_gpu, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def plain(checkpoints):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(checkpoints("llama"), dtype=torch.float32).eval()


def placed(way: str, tmp_path) -> dict:
    options = WAYS[way] | CPU
    return options | ({"offload_dir": tmp_path / "offload"} if "disk_offload" in options else {})


def batch(rows: int, tokens: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """Sequences of different lengths, padded on the left."""
    mask = torch.ones(rows, tokens, dtype=torch.int64)
    for row in range(1, rows):
        mask[row, : row % 3] = 0
    return {"input_ids": 3 + random_ids(seed, rows, tokens, 300) * mask, "attention_mask": mask}


@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=deepspeed_on_cpu) if "deepspeed" in way else way for way in WAYS]
)
def test_a_loaded_model_is_one_of_transformers(way, checkpoints, plain, tmp_path):
    """The same tokens and logits, for batches of any shape that was planned for, one behind the other."""
    with load(checkpoints("llama"), batch_size=3, max_length=24, **placed(way, tmp_path)) as model:
        assert isinstance(model, type(plain)) and model.device.type == "cpu" and model.dtype == torch.float32
        shapes = [(3, 9), (2, 13), (3, 9)] + ([] if model._state.config.kv_offload else [(5, 6)])
        for seed, (rows, tokens) in enumerate(shapes):
            inputs = batch(rows, tokens, seed)
            expected = plain.generate(**inputs, max_new_tokens=8, min_new_tokens=8, do_sample=False)
            found = model.generate(**inputs, max_new_tokens=8, min_new_tokens=8, do_sample=False)
            assert torch.equal(found, expected)
        if "decode_graph" in WAYS[way]:
            assert model._state.loaded.facts["stream"]["decode_graph"].unused_because is None
        inputs = batch(3, 20)
        with torch.no_grad():
            expected = plain(**inputs, labels=inputs["input_ids"])
        found = model(**inputs, labels=inputs["input_ids"])
        torch.testing.assert_close(found.logits, expected.logits, rtol=1e-4, atol=1e-4)
        assert math.exp(found.loss) == pytest.approx(math.exp(expected.loss), rel=1e-5)  # perplexity
        step = model(inputs["input_ids"][:, -1:], past_key_values=found.past_key_values)
        torch.testing.assert_close(
            step.logits,
            plain(inputs["input_ids"][:, -1:], past_key_values=expected.past_key_values).logits,
            rtol=1e-4,
            atol=1e-4,
        )
    assert not torch.distributed.is_initialized() and "LOCAL_RANK" not in os.environ
    assert not list((tmp_path / "offload").glob("*")) if "disk" in way else not (tmp_path / "offload").exists()


def test_other_generations_are_those_of_transformers(checkpoints, plain):
    inputs = batch(2, 7)
    asked = {"max_new_tokens": 6, "do_sample": False}
    with load(checkpoints("llama"), batch_size=4, max_length=16, **CPU) as model:
        for more in (
            {"num_beams": 2},
            {"use_cache": False},
            {"prompt_lookup_num_tokens": 2},
            {"cache_implementation": "static"},
        ):
            rows = {name: value[:1] for name, value in inputs.items()} if "prompt_lookup_num_tokens" in more else inputs
            assert torch.equal(model.generate(**rows, **asked, **more), plain.generate(**rows, **asked, **more)), more
        whole = model.generate(**inputs, **asked, return_dict_in_generate=True)
        again = model.generate(**batch(2, 7, seed=1), **asked)
        assert whole.past_key_values.get_seq_length() == 12 and not torch.equal(again, whole.sequences)
        torch.manual_seed(3)
        sampled = model.generate(inputs["input_ids"], do_sample=True, num_return_sequences=2, max_length=12)
        torch.manual_seed(3)
        assert torch.equal(
            sampled, plain.generate(inputs["input_ids"], do_sample=True, num_return_sequences=2, max_length=12)
        )


def test_a_call_beyond_the_plan_says_what_to_load_with(checkpoints):
    inputs = batch(3, 10)
    with load(checkpoints("llama"), batch_size=2, max_length=16, **CPU) as model:
        assert model.max_length == 16 and any("2 x 16 tokens" in line for line in model.placement)
        with pytest.raises(
            UsageError, match="3 sequences of 20 tokens.* planned for 2 of 16.* batch_size=3, max_length=20"
        ):
            model.generate(**inputs, max_new_tokens=10)
        with pytest.raises(UsageError, match="batch_size=3, max_length=16"):
            model(batch(3, 16)["input_ids"])
        with pytest.raises(UsageError, match="batch_size=2, max_length=17"):
            model(batch(1, 17)["input_ids"])
        model(inputs["input_ids"])
        model.generation_config.max_length = 32  # a checkpoint's own length is shortened to what fits
        assert model.generate(**batch(1, 15)).shape == (1, 16)
        with pytest.raises(UsageError, match="1 sequences of 17 tokens.* max_length=17"):
            model.generate(**batch(1, 16))
    with load(checkpoints("llama"), batch_size=3, max_length=20, kv_offload=True, **CPU) as model:
        assert model.generate(**inputs, max_new_tokens=10, min_new_tokens=10).shape == (3, 20)
        with pytest.raises(UsageError, match="batch_size=4, max_length=20"):
            model(batch(4, 2)["input_ids"])
        with pytest.raises(UsageError, match="kv_offload=True .* not for beam_search"):
            model.generate(**batch(1, 5), max_new_tokens=2, num_beams=2)
        with pytest.raises(UsageError, match="kv_offload=True .* not for beam_search"):
            # nor advice for a larger batch
            model.generate(**batch(2, 5), max_new_tokens=2, num_beams=3)


@pytest.mark.parametrize("way", ["resident", pytest.param("deepspeed", marks=deepspeed_on_cpu)])
def test_an_unloaded_model_holds_nothing_and_says_so(way, checkpoints, tmp_path):
    model = load(checkpoints("llama"), max_length=16, **placed(way, tmp_path))
    parameter = weakref.ref(next(model.parameters()))
    model.generate(**batch(1, 5), max_new_tokens=3)
    unload(model)
    model.unload()
    gc.collect()
    assert parameter() is None and not list(model.parameters())
    for call in (lambda: model(torch.ones(1, 2, dtype=torch.int64)), lambda: model.generate(), lambda: model.device):
        with pytest.raises(UsageError, match="was unloaded"):
            call()


@pytest.mark.parametrize("way", ["stream, cores attend", "accelerate, disk"])
def test_a_model_that_nobody_holds_goes(way, checkpoints, tmp_path, nothing_frozen):
    """As when a notebook's cell is run once more."""
    model = load(checkpoints("llama"), max_length=16, **placed(way, tmp_path))
    model.generate(**batch(1, 5), max_new_tokens=2)
    there, threads = weakref.ref(model), threading.active_count()
    del model
    gc.collect()
    assert there() is None and threading.active_count() <= threads
    assert not list((tmp_path / "offload").glob("*"))


# How the base products of adapted modules are made.
ADAPTED = {
    "resident": {"engine": "resident"},
    "stream": {"gpu_memory": 0, "ring_depth": 2},
    "stream, cores": {"gpu_memory": 0, "cpu_compute": 1},
    "stream, repeated steps": {"gpu_memory": 0, "cpu_compute": 1, "decode_graph": "on"},
    "deepspeed": {"engine": "deepspeed", "cpu_offload": True},
}


@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=deepspeed_on_cpu) if "deepspeed" in way else way for way in ADAPTED]
)
def test_adapters_count_wherever_the_base_product_is_made(way, checkpoints, tmp_path):
    """PEFT around a model that has already generated, and `load_adapter`; switched off and on again, and hooks on inner modules."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    inputs, asked = batch(2, 9), {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
    model = AutoModelForCausalLM.from_pretrained(checkpoints("llama"), dtype=torch.float32).eval()
    base = model.generate(**inputs, **asked)
    adapted = lora(model)
    adapted.save_pretrained(tmp_path / "adapter")
    expected = adapted.generate(**inputs, **asked)
    with torch.no_grad():
        logits = adapted(**inputs).logits
    assert not torch.equal(base, expected)
    options = ADAPTED[way] | CPU | ({"offload_dir": tmp_path / "offload"} if "disk" in way else {})
    with load(checkpoints("llama"), batch_size=2, max_length=20, **options) as model:
        assert torch.equal(model.generate(**inputs, **asked), base)
        adapted = PeftModel.from_pretrained(model, tmp_path / "adapter").eval().to("cpu")
        for _ in range(2):
            torch.testing.assert_close(adapted(**inputs).logits, logits, rtol=1e-4, atol=1e-4)
            assert torch.equal(adapted.generate(**inputs, **asked), expected)
            with adapted.disable_adapter():
                assert torch.equal(adapted.generate(**inputs, **asked), base)
        called = []
        model.model.layers[1].mlp.up_proj.register_forward_hook(lambda *args: called.append(1))
        assert torch.equal(adapted.generate(**inputs, **asked), expected) and len(called) == 8
        if way == "resident":
            assert torch.equal(adapted.merge_and_unload().generate(**inputs, **asked), expected)
    if "stream" in way or "deepspeed" == way:
        with load(checkpoints("llama"), batch_size=2, max_length=20, **options) as model:
            model.load_adapter(str(tmp_path / "adapter"))
            assert torch.equal(model.generate(**inputs, **asked), expected)


@pytest.mark.parametrize("way", ["stream, cores", pytest.param("deepspeed", marks=deepspeed_on_cpu)])
def test_threads_take_turns_in_a_loaded_model(way, checkpoints, plain):
    prompts = [batch(1, 7, seed) for seed in range(6)]
    with torch.no_grad():
        expected = [plain(**inputs).logits for inputs in prompts]
    ids = [plain.generate(**inputs, max_new_tokens=4, min_new_tokens=4, do_sample=False) for inputs in prompts]
    wrong: list = []
    with load(checkpoints("llama"), max_length=16, **ADAPTED[way] | CPU) as model:

        def ask(mine: range) -> None:
            for number in [*mine] * 3:
                found = model(**prompts[number]).logits
                if not torch.allclose(found, expected[number], rtol=1e-3, atol=1e-3):
                    wrong.append(number)
                found = model.generate(**prompts[number], max_new_tokens=4, min_new_tokens=4, do_sample=False)
                if not torch.equal(found, ids[number]):
                    wrong.append(number)

        threads = [threading.Thread(target=ask, args=(range(start, 6, 3),)) for start in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong


def _in_child(model, inputs, answers) -> None:
    try:
        model.generate(**inputs, max_new_tokens=2)
    except UsageError as error:
        answers.send(str(error))
    model.unload()
    answers.send("unloaded")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_is_told_and_leaves_the_parents_model(checkpoints, tmp_path):
    options = placed("accelerate, disk", tmp_path)
    with load(checkpoints("llama"), max_length=16, **options) as model:
        expected, (mine, its) = model.generate(**batch(1, 5), max_new_tokens=3), multiprocessing.Pipe()
        child = multiprocessing.get_context("fork").Process(target=_in_child, args=(model, batch(1, 5), its))
        child.start()
        assert "loaded before a fork" in mine.recv() and mine.recv() == "unloaded"
        child.join()
        assert child.exitcode == 0 and torch.equal(model.generate(**batch(1, 5), max_new_tokens=3), expected)


CHANGES = {
    "half": lambda model: model.half(),
    "move": lambda model: model.to("meta"),
    "save": lambda model: model.save_pretrained("x"),
    "data, in place": lambda model: model.model.layers[1].mlp.up_proj.weight.data.add_(1),
    "behind detach": lambda model: model.model.layers[0].self_attn.q_proj.weight.detach().zero_(),
    "init": lambda model: torch.nn.init.normal_(model.model.norm.weight),
    "load_state_dict": lambda model: model.load_state_dict({"model.norm.weight": torch.zeros(64)}, strict=False),
    "another parameter": lambda model: setattr(model.lm_head, "weight", torch.nn.Parameter(torch.zeros(320, 64))),
    "resize": lambda model: model.resize_token_embeddings(400),
    "merge": lambda model: lora(model).merge_and_unload(),
    "olora": lambda model: lora(model, init_lora_weights="olora"),
    "dora": lambda model: lora(model, use_dora=True),
    "modules_to_save": lambda model: lora(model, modules_to_save=["lm_head"]),
}


def lora(model, targets: tuple[str, ...] = ("q_proj", "v_proj", "down_proj"), **settings):
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(5)
    return get_peft_model(
        model, LoraConfig(r=4, target_modules=list(targets), **{"init_lora_weights": False} | settings)
    ).eval()


@pytest.mark.parametrize("way", ["stream, cores", "accelerate", pytest.param("deepspeed", marks=deepspeed_on_cpu)])
def test_weights_that_an_engine_placed_cannot_be_changed(way, checkpoints, plain):
    """Refused at once, or by the next call: never an answer of the model as it was."""
    options = ADAPTED.get(way) or WAYS[way]
    inputs, changes = batch(1, 5), dict(CHANGES)
    with load(checkpoints("llama"), max_length=16, **options | CPU) as model:
        assert model.to("cpu") is model and model.cpu() is model and model.to(torch.float32).float() is model
        torch.testing.assert_close(model(**inputs).logits, plain(**inputs).logits, rtol=1e-4, atol=1e-4)
        # these leave something
        last = "data, in place;behind detach;init;another parameter;merge;olora;dora;modules_to_save".split(";")
        for name in changes.keys() - set(last):
            with pytest.raises(UsageError, match="cannot be"):
                changes[name](model)
        assert not model(**inputs).logits.requires_grad
    for name in [name for name in last if name in changes]:
        with load(checkpoints("llama"), max_length=16, **options | CPU) as model:
            # PEFT itself may stumble over weights that are not there
            stumbles = (RuntimeError,) if name in ("olora", "dora") else ()
            with pytest.raises(
                (UsageError, *stumbles), match=None if stumbles else "cannot be changed|load it|load the model again"
            ):
                with torch.no_grad():
                    changes[name](model)
                model(**inputs)


@pytest.mark.parametrize("way", ["stream", "accelerate", pytest.param("deepspeed", marks=deepspeed_on_cpu)])
def test_lm_eval_scores_a_loaded_model(way, readable, tmp_path):
    need_lm_eval()
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM
    from transformers import AutoModelForCausalLM, AutoTokenizer

    def scores(model, tokenizer) -> tuple[list, list]:
        lm = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=2, max_length=64)
        pairs = [("The capital of France is", " Paris"), ("Water", " is wet and cold"), ("One", " two")]
        asked = [Instance("loglikelihood", {}, pair, number) for number, pair in enumerate(pairs)]
        settings = {"until": ["\n"], "max_gen_toks": 6, "do_sample": False}
        continued = [Instance("generate_until", {}, (text, settings), number) for number, text in enumerate(TEXTS)]
        found = lm.loglikelihood(asked, disable_tqdm=True)
        return [value for value, _ in found], lm.generate_until(continued, disable_tqdm=True)

    tokenizer = AutoTokenizer.from_pretrained(readable)
    likelihoods, texts = scores(AutoModelForCausalLM.from_pretrained(readable, dtype=torch.float32).eval(), tokenizer)
    with load(readable, batch_size=2, max_length=64, **placed(way, tmp_path)) as model:
        assert model.tokenizer.padding_side == "left" and model.tokenizer.pad_token is not None
        found, written = scores(model, model.tokenizer)
    assert found == pytest.approx(likelihoods, rel=1e-4) and written == texts


@deepspeed_on_cpu
def test_runs_follow_each_other_in_one_process(checkpoints, tmp_path, nothing_frozen):
    """Of different engines, with a refused one in between, and from another thread."""
    folder, found = checkpoints("llama"), []
    before = signal.getsignal(signal.SIGTERM), gc.isenabled(), gc.get_freeze_count(), sys.excepthook
    expected = plain_ids(folder, random_ids(0, 2, 8, 320), 5)

    def measure(**engine) -> None:
        shape = {"prompt_len": 8, "gen_len": 5, "batch_size": 2, "loops": 1, "warmup": 0}
        found.append(run(folder, log_file=tmp_path / "own.log", **shape, **engine, **CPU))

    measure(engine="resident")
    measure(cpu_offload=True)
    with pytest.raises(UsageError, match="128"):
        run(folder, prompt_len=400, log=False, **CPU)
    thread = threading.Thread(target=measure, kwargs={"engine": "stream"})
    thread.start()
    thread.join()
    records = [json.loads(line) for line in (tmp_path / "own.jsonl").read_text().splitlines()]
    assert [result.record for result in found] == records
    assert [record["engine"] for record in records] == ["resident", "deepspeed", "stream"]
    for result in found:
        assert torch.equal(result.output_ids, expected)
        assert result.text is None and result.record_file == tmp_path / "own.jsonl"
        assert result.tokens_per_s == result.record["decode_throughput"] == pytest.approx(2 * 4 / result.decode_s)
        assert result.step_s == pytest.approx(result.decode_s / 4) and result.prefill_s < result.total_s
    assert "RANK" not in os.environ and not torch.distributed.is_initialized()
    assert before == (signal.getsignal(signal.SIGTERM), gc.isenabled(), gc.get_freeze_count(), sys.excepthook)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["own.jsonl", "own.log"]


def test_a_failed_run_raises_and_the_next_one_works(checkpoints, tmp_path):
    import shutil

    damaged = tmp_path / "damaged"
    shutil.copytree(checkpoints("llama"), damaged)
    shape = {"prompt_len": 8, "gen_len": 3, "loops": 1, "warmup": 0, "engine": "stream", **CPU}
    for file in damaged.glob("*.safetensors"):
        file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(RunError, match="damaged"):
        run(damaged, log_dir=tmp_path / "logs", **shape)
    record = json.loads(next((tmp_path / "logs").glob("*.jsonl")).read_text())
    assert record["status"] == "failed" and record["argv"][0] == "zero_inference.run"
    with pytest.raises(RunError):
        load(damaged, **CPU)
    assert run(checkpoints("llama"), log=False, **shape).record["status"] == "ok"


def test_prompts_become_text_and_nothing_is_printed(readable, capsys):
    result = run(readable, engine="stream", prompts=TEXTS, prompt_len=8, gen_len=4, loops=1, warmup=0, log=False, **CPU)
    assert capsys.readouterr().out == ""
    assert len(result.text) == result.record["batch_size"] == 2 and all(isinstance(text, str) for text in result.text)
    assert "token/s" in repr(result) and "batch 2, prompt 8, 4 new tokens" in repr(result)
    with pytest.raises(UsageError, match="number 2 is not one line"):
        run(readable, prompts=["one", "two\nthree"], log=False, **CPU)


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: run("x", quantbits=4), "run.* 'quantbits'; did you mean quant_bits"),
        (lambda: run("x", dry_run=True), "zero_inference.plan"),
        (lambda: run("x", log=False, log_dir="y"), "drop one of the two"),
        (lambda: load("x", device_map="auto"), "load.* 'device_map'; did you mean engine"),
        (lambda: run("x", max_new_tokens=4), "run.* 'max_new_tokens'; did you mean gen_len"),
        (lambda: load("x", cpu_offlod=True), "load.* 'cpu_offlod'; did you mean cpu_offload"),
        (lambda: load("x", prompt_len=3), "max_length"),
        (lambda: load("x", loops=3), "zero_inference.run"),
        (lambda: plan("x", batchsize=3), "plan.* 'batchsize'; did you mean batch_size"),
        (lambda: plan("x", json=True), "frame"),
    ],
)
def test_a_wrong_keyword_is_a_type_error_that_helps(call, words):
    with pytest.raises(TypeError, match=words):
        call()


def test_what_cannot_work_is_refused_in_the_words_of_the_command(checkpoints):
    folder = checkpoints("llama")
    for call, words in (
        (lambda: run(folder, engine="resident", cpu_offload=True), "--engine resident keeps every weight"),
        (lambda: run(folder, quant_bits=5), "--quant-bits"),
        (lambda: run(folder, engine="stream", gpu_memory=False), "--gpu-memory false: not a size"),
        (lambda: load(folder, engine="accelerate"), "--engine accelerate"),
        (lambda: load(folder, max_length=500), "max_length=500: .* has 128 positions"),
        (lambda: load(folder, max_length=1), "use 2 or more"),
        (lambda: plan(folder, machine="rtx409"), "did you mean rtx4090"),
    ):
        with pytest.raises(UsageError, match=words):
            call()


def test_a_plan_is_what_the_command_prints(capsys):
    asked = {"batch_size": [1, 8], "quant_bits": [16, 4], "engine": ["stream", "resident"], "gen_len": 16}
    found = plan("llama-2-13b", machine="rtx4090", assume={"host": "128GiB"}, kv_offload=False, **asked)
    words = "--batch-size 1 8 --quant-bits 16 4 --engine stream resident --gen-len 16 --kv-offload off --json".split()
    where = ["--machine", "rtx4090", "--assume", "host=128GiB"]
    capsys.readouterr()
    assert console_main(["zero-inference", "plan", "--model", "llama-2-13b", *where, *words]) == 0
    said = json.loads(capsys.readouterr().out)
    fitting = [row for row in found if row.fits]
    assert len(fitting) == len(said["configurations"]) > 2
    for row, theirs in zip(fitting, said["configurations"]):
        names = ("engine", "quant_bits", "batch_size", "command")
        assert [row.engine, row.bits, row.batch, row.command] == [theirs[name] for name in names]
        assert (row.tokens_per_s, row.step_s) == pytest.approx((theirs["tokens_per_s"], theirs["step_s"]))
        assert command_of(make_config(row.options)) == row.command
        assert row.device_gib * 2**30 == pytest.approx(theirs["device_bytes"])
    best = found.best
    assert best is found[0] and best.options["batch_size"] == best.batch == best.placement["batch_size"]
    assert best.options["model"] == "llama-2-13b" and "gen_len" in best.options and "gen_len" not in best.placement
    refused = [row for row in found if not row.fits]
    assert [row.engine for row in refused] == ["resident"] and "device memory" in refused[0].why_not
    frame = found.frame()
    assert len(frame) == len(found) and frame["tokens_per_s"][0] == best.tokens_per_s
    for shown in (repr(found), found._repr_html_()):
        assert "Fastest: stream int4" in shown and "does not fit: resident" in shown and "RTX 4090" in shown


def test_a_model_that_fits_nowhere_is_a_verdict_and_no_error():
    found = plan("llama-3.1-405b", machine="rtx4090", assume="host=64GiB", engine="stream", quant_bits=4, batch_size=1)
    assert found.best is None and not any(row.fits for row in found) and len(found) == 1
    assert "the smallest machine that could run it" in found.verdict and found.verdict in repr(found)
