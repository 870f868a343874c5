"""Scores of the loaded model equal those of lm-eval on the plain transformers model, item by item, in every engine."""

from __future__ import annotations

import json
import math
import random

import pytest
import torch
from conftest import build_model, need_lm_eval
from test_sandbox import REFUSED

from zero_inference.architectures import QualityBenchmark
from zero_inference.cli import main
from zero_inference.errors import RunError, UsageError
from zero_inference.quality.data import check_items
from zero_inference.quality.evaluate import format_scores, read_choices

BATCH = 4
WINDOW, STRIDE = 48, 20
NEW_TOKENS = 12
WAYS = {
    "resident": ["--engine", "resident"],
    "accelerate": ["--engine", "accelerate", "--cpu-offload"],
    "cpu offload": ["--cpu-offload"],
    "NVMe": ["--disk-offload"],
    "stream": ["--engine", "stream", "--ring-depth", "3"],
}
COUNTRIES = "France Italy Japan Spain Egypt Russia Greece".split()
CAPITALS = dict(zip(COUNTRIES, "Paris Rome Tokyo Madrid Cairo Moscow Athens".split()))
TEXT = (
    "The river was low that year, and the boats lay on the mud. " * 3
    + "Nobody spoke of rain; everybody looked at the sky. " * 4
)


def hellaswag_items() -> list[dict]:
    """15 beginnings with four endings of different lengths."""
    draw = random.Random(5)
    endings = [
        "pours the water into the cup.",
        "is a violin of the moon, seventeen at most and never blue.",
        "washes it.",
        "flies over the roof with both hands, and the table follows it.",
        "sits down to eat.",
        "reads the letter once more, slowly.",
    ]
    what = ["takes the bread out of the oven", "opens the window", "fills the kettle, waits until it boils,"]
    what += ["looks at the plate", "comes in from the garden"]
    beginnings = [f"{one} {other} and" for one in ("A man", "The cook", "My sister") for other in what]
    return [{"ctx": each, "endings": draw.sample(endings, 4), "label": draw.randrange(4)} for each in beginnings]


def mmlu_items() -> list[dict]:
    """Questions answered by a letter (one token: four share a forward), by a word, and by what looks like a date."""
    draw = random.Random(6)
    items = []
    for country, city in CAPITALS.items():
        choices = draw.sample(sorted(set(CAPITALS.values()) - {city}), 3) + [city]
        draw.shuffle(choices)
        question = f"What is the capital of {country}?"
        letters = "".join(f"\n{letter}. {choice}" for letter, choice in zip("ABCD", choices))
        items.append(
            {"prompt": f"{question}{letters}\nAnswer:", "choices": list("ABCD"), "answer": choices.index(city)}
        )
        items.append({"prompt": f"{question}\nAnswer:", "choices": choices, "answer": choices.index(city)})
    dates = ["1945-05-08", "1944-06-06", "1939-09-01", "1918-11-11"]
    return [*items, {"prompt": "The second world war in Europe ended on", "choices": dates, "answer": 0}]


def problems() -> list[dict]:
    """Three, so that two ranks have unequal work; what is written for 1 and 2 stands in a text, which 1 passes with and 2 not."""
    prompt = "def {name}(a, b):\n    return a\n\n\nEXPLAINED = r'''"
    return [
        {
            "prompt": 'def add(a, b):\n    """Add the two numbers."""\n    return',
            "entry_point": "add",
            "test": "def check(f):\n    assert f(2, 3) == 5",
        },
        {
            "prompt": "import math\n\n" + prompt.format(name="first"),
            "entry_point": "first",
            "test": "'''\ndef check(f):\n    assert f(1, 2) == 1",
        },
        {
            "prompt": prompt.format(name="impossible"),
            "entry_point": "impossible",
            "test": "'''\ndef check(f):\n    assert f(1, 2) > f(1, 2)",
        },
    ]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    for name, items in (("hellaswag", hellaswag_items()), ("mmlu", mmlu_items()), ("humaneval", problems())):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
    (folder / "perplexity.txt").write_text(TEXT)
    return folder


@pytest.fixture(scope="module")
def small(smollm2_folder, tmp_path_factory):
    """A checkpoint of two small layers with SmolLM2's tokenizer."""
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("small") / "small"
    tokenizer = AutoTokenizer.from_pretrained(smollm2_folder)
    sizes = dict(num_hidden_layers=2, vocab_size=len(tokenizer), max_position_embeddings=2048)
    build_model("llama", **sizes).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def plain(small):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    return AutoModelForCausalLM.from_pretrained(small, dtype=torch.float32).eval(), AutoTokenizer.from_pretrained(small)


@pytest.fixture(scope="module")
def expected(data, plain):
    """What lm-eval says of plain transformers: task -> log-likelihoods, acc and acc_norm of each item; and its perplexity."""
    need_lm_eval()
    from lm_eval import evaluator
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.models.huggingface import HFLM

    model, tokenizer = plain
    lm = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=BATCH)
    metrics = [{"metric": name, "aggregation": "mean", "higher_is_better": True} for name in ("acc", "acc_norm")]
    tasks = {}
    for name, text, choices, target in (
        ("hellaswag", "{{ctx}}", "{{endings}}", "{{label}}"),
        ("mmlu", "{{prompt}}", "{{choices}}", "{{answer}}"),
    ):
        config = {"task": name, "dataset_path": "json", "test_split": "test", "output_type": "multiple_choice"}
        config["dataset_kwargs"] = {"data_files": {"test": str(data / f"{name}.jsonl")}}
        config |= {"doc_to_text": text, "doc_to_choice": choices, "doc_to_target": target, "metric_list": metrics}
        tasks[name] = ConfigurableTask(config=config)
    found = evaluator.evaluate(lm, tasks, bootstrap_iters=0)
    answers = {
        name: [
            ([float(answer[0]) for answer in sample["filtered_resps"]], sample["acc"], sample["acc_norm"])
            for sample in found["samples"][name]
        ]
        for name in tasks
    }
    return answers | {
        "scores": found["results"],
        "completions": plain_completions(model, lm.tokenizer),
        "text": {
            window: plain_log_likelihoods(model, lm.tokenizer, window, stride)
            for window, stride in ((WINDOW, STRIDE), (1024, 512))
        },
    }


def plain_completions(model, tokenizer) -> list[str]:
    """What `generate` makes of each problem alone, up to the first sign that the function has ended."""
    texts = []
    for problem in problems():
        ids = tokenizer(problem["prompt"], return_tensors="pt")
        new = model.generate(**ids, max_new_tokens=NEW_TOKENS, do_sample=False)[0, ids["input_ids"].shape[1] :]
        text = tokenizer.decode(new, skip_special_tokens=True)
        for stop in ("\nclass", "\ndef", "\n#", "\nif", "\nprint"):
            text = text.split(stop)[0]
        texts.append(text)
    return texts


def plain_log_likelihoods(model, tokenizer, window: int, stride: int) -> torch.Tensor:
    """Of each token of TEXT, seen through windows: slices of the plain model's logits, computed without lm-eval."""
    tokens = [tokenizer.bos_token_id] + tokenizer(TEXT)["input_ids"]
    values, done = [], 1
    while done < len(tokens):
        new = min(window if done == 1 else stride, len(tokens) - done)
        end = done + new
        ids = torch.tensor([tokens[max(0, end - 1 - window) : end - 1]])
        with torch.no_grad():
            scores = model(ids).logits[0, -new:].log_softmax(-1)
        values.append(scores.gather(1, torch.tensor(tokens[done:end])[:, None])[:, 0])
        done = end
    return torch.cat(values)


def options(small, data, items, *more) -> list[str]:
    code = "" if REFUSED else f"--allow-code-execution --humaneval-tokens {NEW_TOKENS}"
    tasks = f"hellaswag,mmlu,perplexity{'' if REFUSED else ',humaneval'}"
    scores = f"--quality {tasks} --quality-data {data} --quality-batch-size {BATCH} --quality-items {items} {code}"
    run = f"--model {small} --dtype float32 --prompt-len 8 --gen-len 2 --loops 1 --warmup 0"
    return [*run.split(), *scores.split(), *map(str, more)]


def check_against(expected, record: dict, items_file, window: int, stride: int) -> None:
    items = [json.loads(line) for line in items_file.read_text().splitlines()]
    for task in ("hellaswag", "mmlu"):
        mine = [item for item in items if item["task"] == task]
        assert [item["item"] for item in mine] == list(range(len(expected[task])))
        for item, (values, acc, acc_norm) in zip(mine, expected[task]):
            assert item["log_likelihoods"] == pytest.approx(values, abs=2e-3, rel=1e-4)
            assert item["correct"] == acc and item.get("correct_norm", acc_norm) == acc_norm
        scores, theirs = record["quality"][task], expected["scores"][task]
        assert scores["accuracy"] == pytest.approx(theirs["acc,none"]) and scores["total"] == len(mine)
        p, n = scores["accuracy"], len(mine)
        assert 0 < p < 1 and scores["stderr"] == pytest.approx(math.sqrt(p * (1 - p) / (n - 1)))
        assert scores["outcomes"].count("1") == scores["correct"] == round(p * n) and len(scores["outcomes"]) == n
    assert record["quality"]["hellaswag"]["acc_norm"] == pytest.approx(expected["scores"]["hellaswag"]["acc_norm,none"])
    text, values = record["quality"]["perplexity"], expected["text"][window]
    assert (text["tokens"], text["window"], text["stride"]) == (len(values), window, stride)
    assert text["windows"] == 1 + max(0, math.ceil((text["tokens"] - window) / stride))
    assert text["perplexity"] == pytest.approx(math.exp(-values.mean().item()), rel=1e-4)
    assert text["stderr"] is None if text["windows"] == 1 else text["stderr"] > 0
    if not REFUSED:
        written = [item["samples"][0] for item in items if item["task"] == "humaneval"]
        assert [one["completion"] for one in written] == expected["completions"]
        assert written[1]["verdict"] == "passed" and "AssertionError" in written[2]["verdict"]
        scores = record["quality"]["humaneval"]
        assert scores["problems"] == 3 and scores["n"] == 1 and scores["k"] == [1]
        passed = sum(one["verdict"] == "passed" for one in written)
        assert sum(scores["passed"]) == passed and scores["pass_at_k"]["1"] == passed / 3


@pytest.mark.parametrize("way", WAYS)
def test_scores_equal_lm_eval_on_the_plain_model(way, small, data, expected, tmp_path, capfd):
    windows = ["--perplexity-window", WINDOW, "--perplexity-stride", STRIDE]
    more = [*WAYS[way], *windows, "--log-file", tmp_path / "run.log"]
    if way == "NVMe":
        more += ["--offload-dir", tmp_path / "offload"]
    assert main(["run_model.py", *options(small, data, tmp_path / "items", *more)]) == 0
    check_against(expected, json.loads((tmp_path / "run.jsonl").read_text()), tmp_path / "items", WINDOW, STRIDE)
    printed = capfd.readouterr().out
    assert all(words in printed for words in ("hellaswag: accuracy", "acc_norm", "mmlu: accuracy", "stride 20"))


def test_two_ranks_score_as_one(small, data, expected, run_model, tmp_path):
    """The shares need different numbers of forwards: four letters share one, and the text is one window, for the first rank."""
    done = run_model(
        *options(small, data, tmp_path / "items", "--batch-size", 2, *WAYS["cpu offload"]), launcher="by hand", ranks=2
    )
    assert done.code == 0, done.stderr
    assert done.record["world_size"] == 2
    check_against(expected, done.record, tmp_path / "items", 1024, 512)


def test_quality_benchmark_gives_the_same_scores(plain, expected):
    benchmark = QualityBenchmark(*plain, batch_size=BATCH)
    scores = benchmark.evaluate_task("hellaswag", hellaswag_items())
    theirs = expected["scores"]["hellaswag"]
    assert (scores["accuracy"], scores["acc_norm"]) == pytest.approx((theirs["acc,none"], theirs["acc_norm,none"]))
    assert {"accuracy", "stderr", "correct", "total"} <= scores.keys()
    import pandas

    correct = benchmark.evaluate_task("mmlu", pandas.DataFrame(mmlu_items()))["correct"]
    assert correct == sum(acc for _, acc, _ in expected["mmlu"])


def test_log_probabilities_are_float32_and_lm_evals_default_stands_beside_them(small, plain):
    """In bfloat16 likelihoods of -10 are multiples of 1/16, and choices tie."""
    need_lm_eval()
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM
    from transformers import AutoModelForCausalLM

    model, tokenizer = AutoModelForCausalLM.from_pretrained(small, dtype=torch.bfloat16).eval(), plain[1]
    benchmark, found = QualityBenchmark(model, tokenizer, batch_size=BATCH), {}
    for name, dtype in (("float32", "float32"), ("own", None)):
        lm = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=BATCH, softmax_dtype=dtype)
        asked = [
            Instance("loglikelihood", {}, (item["prompt"], f" {choice}"), 0)
            for item in mmlu_items()
            for choice in item["choices"]
        ]
        answers = torch.tensor([value for value, _ in lm.loglikelihood(asked, disable_tqdm=True)]).view(-1, 4)
        right = answers.argmax(1) == torch.tensor([item["answer"] for item in mmlu_items()])
        nll = -lm.loglikelihood_rolling([Instance("loglikelihood_rolling", {}, (TEXT,), 0)], disable_tqdm=True)[0]
        found[name] = answers, right.float().mean().item(), nll
    assert not torch.equal(found["float32"][0], found["own"][0])
    scores = benchmark.evaluate_task("mmlu", mmlu_items())
    assert scores["accuracy"] == pytest.approx(found["float32"][1])
    beside = scores["accuracy_in_dtype"]
    assert (scores["accuracy"] if beside is None else beside) == pytest.approx(found["own"][1])
    text = benchmark.evaluate_task("perplexity", [{"text": TEXT}])
    for key, name in (("perplexity", "float32"), ("perplexity_in_dtype", "own")):
        assert math.log(text[key]) * text["tokens"] == pytest.approx(found[name][2], rel=1e-6)
    assert f" (lm-eval's default {text['perplexity_in_dtype']:.3f}) a token" in format_scores("perplexity", text)


def test_quality_benchmark_refuses_what_it_cannot_do(plain):
    model, tokenizer = plain
    for task, rows, error, words in (
        ("arc", [], ValueError, "arc.*mmlu, hellaswag, humaneval, perplexity"),
        ("mmlu", [], UsageError, "no mmlu items"),
        ("hellaswag", [{"ctx": "a", "endings": list("abcd")}], UsageError, "item 0: no field label"),
        ("humaneval", problems(), UsageError, "allow_code_execution"),
    ):
        with pytest.raises(error, match=words):
            QualityBenchmark(model, tokenizer).evaluate_task(task, rows)
    with pytest.raises(UsageError, match="tokenizer"):
        QualityBenchmark(model, None)
    with pytest.raises(ValueError, match="k = 5 with n = 1"):
        QualityBenchmark(model, tokenizer, ks=(5,))


def test_published_hellaswag_columns_are_read_in_lm_evals_way():
    need_lm_eval()
    row = {
        "ctx": "raw [header] text",
        "ctx_a": "[header] How to sit [title] Find a  chair.",
        "ctx_b": "then you",
        "label": "2",
        "activity_label": "Sitting",
        "endings": ["[step] sit.", "stand.", "run.", "fly."],
        "split": "val",
    }
    (item,) = check_items("hellaswag", [("row", row)])
    (doc,) = read_choices("hellaswag", [item])
    assert doc == ("Sitting: How to sit. Find a chair. Then you", [" sit.", "stand.", "run.", "fly."], 2)


def test_scores_that_are_no_numbers_end_the_evaluation(plain):
    need_lm_eval()
    wrong = build_model("llama", num_hidden_layers=1, vocab_size=len(plain[1]))
    wrong.lm_head.weight.data.fill_(float("nan"))
    for task, items in (("mmlu", mmlu_items()[:2]), ("perplexity", [{"text": TEXT}])):
        with pytest.raises(RunError, match=f"{task}.*--dtype"):
            QualityBenchmark(wrong, plain[1]).evaluate_task(task, items)


def test_a_score_that_cannot_be_had_keeps_the_timings(small, tmp_path, capfd):
    """An answer longer than the model's context, which only its tokens show."""
    need_lm_eval()
    item = {"prompt": "Say it:", "choices": ["a", "b", "c", "word " * 2500], "answer": 0}
    (tmp_path / "mmlu.jsonl").write_text(json.dumps(item) + "\n")
    run = f"--model {small} --engine resident --prompt-len 8 --gen-len 3 --loops 1 --log-file {tmp_path}/run.log"
    code = main(["run_model.py", *run.split(), *f"--quality mmlu --quality-data {tmp_path}/mmlu.jsonl".split()])
    record = json.loads((tmp_path / "run.jsonl").read_text())
    assert code == 1 and record["status"] == "failed" and record["decode_latency_s"] > 0
    assert "an answer has 25" in record["error"] and "the model's context is only 2048" in capfd.readouterr().err


def test_a_perplexity_beyond_all_floats_does_not_end_a_run_that_was_measured(plain):
    need_lm_eval()
    wild = build_model("llama", num_hidden_layers=1, vocab_size=len(plain[1]))
    wild.lm_head.weight.data *= 1e5
    scores = QualityBenchmark(wild, plain[1], window=WINDOW, stride=STRIDE).evaluate_task(
        "perplexity", [{"text": TEXT}]
    )
    assert scores["perplexity"] == math.inf and scores["nll_per_token"] > 1000
    assert format_scores("perplexity", scores).startswith("perplexity: inf")
