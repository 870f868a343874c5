"""--prompt and --chat: texts from the command line, in their own length unless another is asked for."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path

import pytest
import torch
from conftest import VOCAB, build_model, plain_ids
from transformers import GenerationConfig

from zero_inference.cli import main
from zero_inference.config.run_config import RunConfig, parse_options
from zero_inference.errors import UsageError
from zero_inference.measure.session import output_ids_sha256
from zero_inference.models.prompts import (
    TEXT,
    eos_token_ids,
    greedy_config,
    prompt_excerpts,
    prompt_ids,
    reset_generation_config,
    with_prompt_length,
)
from zero_inference.models.spec import load_tokenizer, resolve_model
from zero_inference.records.read import read_records
from zero_inference.report.results import print_texts

TEMPLATE = (
    "{% for m in messages %}<s> <|{{ m['role'] }}|> {{ m['content'] }} </s> {% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SHORT = "--gen-len 4 --loops 1 --warmup 0 --dtype float32".split()


@pytest.fixture(scope="module")
def folder(checkpoints, tmp_path_factory) -> Path:
    """A checkpoint of the tests with a tokenizer of whole words, which begins each sequence with <s>, and a chat template."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    made = tmp_path_factory.mktemp("with-tokenizer") / "llama"
    shutil.copytree(checkpoints("llama"), made)
    special = ["<unk>", "<s>", "</s>", "<|user|>", "<|assistant|>"]
    words = pre_tokenizers.Whitespace().pre_tokenize_str(" ".join(TEXT))
    names = list(dict.fromkeys([*special, *(word for word, _ in words)]))
    tokenizer = Tokenizer(models.WordLevel({name: at for at, name in enumerate(names)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    marks = dict(bos_token="<s>", eos_token="</s>", unk_token="<unk>", extra_special_tokens=special[3:])
    whole = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **marks)
    whole.chat_template = TEMPLATE
    whole.save_pretrained(made)
    return made


def ids_of(folder: Path, *options: str) -> torch.Tensor:
    config = parse_options([str(folder), *options])
    spec = resolve_model(config, "cpu")
    return prompt_ids(with_prompt_length(config, spec), spec)[0]


def test_the_text_itself_is_the_prompt(folder):
    tokenizer = load_tokenizer(resolve_model(RunConfig(model=str(folder)), "cpu"))
    text = "The capital of France is"
    assert ids_of(folder, "--prompt", text).tolist() == [tokenizer(text)["input_ids"]]
    long = "Bread needs flour , water , salt and patience"
    two = ids_of(folder, "--prompt", text, "--prompt", long)
    assert two[1].tolist() == tokenizer(long)["input_ids"]
    assert two[0, -5:].tolist() == tokenizer(text, add_special_tokens=False)["input_ids"] and two[0, 0] == 1
    repeated = ids_of(folder, "--prompt", text, "--prompt", long, "--batch-size", "5")
    assert torch.equal(repeated, two[[0, 1, 0, 1, 0]])


def test_with_a_length_it_is_cut_or_filled_up(folder):
    text = "The capital of France is"
    plain = ids_of(folder, "--prompt", text)[0]
    filled = ids_of(folder, "--prompt", text, "--prompt-len", "20")[0]
    assert len(filled) == 20 and filled[0] == plain[0] and torch.equal(filled[-5:], plain[1:])
    assert torch.equal(ids_of(folder, "--prompt", text, "--prompt-len", "3")[0], plain[:3])


def test_a_chat_is_what_the_template_makes_of_it(folder):
    tokenizer = load_tokenizer(resolve_model(RunConfig(model=str(folder)), "cpu"))
    for text in ("The capital of France is", TEXT[0], "salt"):
        said = [{"role": "user", "content": text}]
        expected = tokenizer.apply_chat_template(said, add_generation_prompt=True, return_dict=False)
        assert ids_of(folder, "--prompt", text, "--chat").tolist() == [expected]
    filled = ids_of(folder, "--prompt", "salt", "--chat", "--prompt-len", "20")[0]
    said = tokenizer.decode(filled).split()
    assert len(filled) == 20 and said[:2] == ["<s>", "<|user|>"] and said[-3:] == ["salt", "</s>", "<|assistant|>"]
    with pytest.raises(UsageError, match="--prompt-len 4: the chat template alone takes 4 tokens; ask for more"):
        ids_of(folder, "--prompt", "salt", "--chat", "--prompt-len", "4")


def test_plan_log_and_record_have_the_length_of_the_text(folder, monkeypatch, capsys, tmp_path, no_gpu):
    monkeypatch.chdir(tmp_path)
    run = ["run_model.py", str(folder), "--engine", "resident", *SHORT, "--prompt", "The capital of France is"]
    assert main(run) == 0
    (log,) = Path("logs").glob("*.log")
    assert log.name == "resident-llama-bs1-prompt6-gen4-n1x1-cpu.log"
    (record,) = read_records(log.with_suffix(".jsonl"))
    assert (record["prompt_len"], record["batch_size"]) == (6, 1)
    assert record["options"]["prompt"] == ["The capital of France is"] and record["options"]["prompt-len"] == 6
    capsys.readouterr()
    assert main([*run, "--dry-run", "--json"]) == 0
    assert '"prompt_len": 6' in capsys.readouterr().out


@pytest.mark.parametrize("engine", ["resident", "stream"])
def test_engines_see_the_same_ids(engine, folder, tmp_path, no_gpu):
    options = ["--prompt", "The capital of France is", "--prompt", "salt and water", "--chat"]
    log = ["--log-file", str(tmp_path / "run.log")]
    assert main(["run_model.py", str(folder), *SHORT, "--engine", engine, *options, *log]) == 0
    (record,) = read_records(tmp_path / "run.jsonl")
    expected = plain_ids(folder, ids_of(folder, *options), 4)
    assert record["output_ids_sha256"] == output_ids_sha256(expected) and record["batch_size"] == 2


@pytest.mark.parametrize(
    "options, words",
    [
        ("--prompt x --dummy", "--prompt needs a tokenizer and --dummy runs on random token ids"),
        ("--prompt x --prompts p.txt", "--prompt and --prompts p.txt both give the prompts"),
        ("--prompt ' '", "--prompt is empty"),
        ("--chat", "--chat belongs to --prompt or --prompts"),
        ("--prompt x --prompt y --batch-size 1", "--batch-size 1: 2 prompts were given; use 2 or more"),
        ("--prompt-len 0", "--prompt-len 0: must be at least 1"),
    ],
)
def test_options_of_prompts_that_contradict_each_other(options, words):
    with pytest.raises(UsageError, match=words):
        parse_options(["opt-125m", *shlex.split(options)])


def test_models_that_cannot_read_a_prompt(checkpoints, folder, tmp_path, capsys):
    assert main(["run_model.py", str(checkpoints("llama")), "--prompt", "x", "--dry-run"]) == 2
    assert "has no tokenizer to read it with; drop --prompt." in capsys.readouterr().err
    without = shutil.copytree(folder, tmp_path / "no-template")
    (without / "chat_template.jinja").unlink()
    assert main(["run_model.py", str(without), "--prompt", "x", "--chat", "--dry-run"]) == 2
    assert "has no chat template; drop --chat" in capsys.readouterr().err


def test_a_text_is_shown_behind_the_last_line_of_its_prompt(folder, capsys):
    spec = resolve_model(RunConfig(model=str(folder)), "cpu")
    tokenizer = load_tokenizer(spec)
    said = tokenizer("salt and", add_special_tokens=False)["input_ids"]
    short = prompt_excerpts(RunConfig(model=str(folder)), torch.tensor([said]), tokenizer)
    print_texts(torch.tensor([said]), tokenizer, prompts=short)
    assert capsys.readouterr().out.splitlines()[0] == "[0] salt and -> salt and"
    chat = RunConfig(model=str(folder), prompt=("One.\nTwo?", "Three?"), chat=True, batch_size=3)
    assert prompt_excerpts(chat, torch.tensor([said] * 3), tokenizer) == ["Two?", "Three?", "Two?"]


def test_a_shown_text_ends_where_the_model_ends_it(folder, tmp_path, capsys):
    spec = resolve_model(RunConfig(model=str(folder)), "cpu")
    tokenizer = load_tokenizer(spec)
    assert eos_token_ids(spec, tokenizer) == {2}
    said = tokenizer("salt and", add_special_tokens=False)["input_ids"]
    print_texts(torch.tensor([[*said, 2, *said]]), tokenizer, eos_token_ids(spec, tokenizer))
    assert capsys.readouterr().out.splitlines()[0] == "[0] salt and"
    other = shutil.copytree(folder, tmp_path / "model")
    for text, expected in (('{"eos_token_id": [2, 4]}', {2, 4}), ("damaged", {2})):
        (other / "generation_config.json").write_text(text)
        assert eos_token_ids(resolve_model(RunConfig(model=str(other)), "cpu"), tokenizer) == expected


def test_tokens_are_those_of_an_argmax_loop_and_exactly_as_many_as_asked_for():
    model = build_model("llama")
    ids = torch.randint(3, VOCAB, (2, 9), generator=torch.Generator().manual_seed(3))
    expected = ids
    with torch.no_grad():
        for _ in range(7):
            expected = torch.cat([expected, model(expected, use_cache=False).logits[:, -1].argmax(-1, keepdim=True)], 1)
    stop = int(expected[0, ids.shape[1]])  # the first token: generation must not end there
    settings = dict(do_sample=True, temperature=9.0, forced_bos_token_id=5, num_beams=3, repetition_penalty=5.0)
    model.generation_config = GenerationConfig(eos_token_id=stop, **settings)
    reset_generation_config(model)
    output = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=greedy_config(7))
    assert torch.equal(output, expected)
