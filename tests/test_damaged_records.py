"""Readers of logs and records meet anything: damaged lines, foreign values, hostile text. Seeded mutations of committed records."""

from __future__ import annotations

import copy
import importlib.util
import json
import os
import random
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import pytest
from test_report import make_record, run_main

from zero_inference.records import read
from zero_inference.records.read import read_records
from zero_inference.records.schema import Record
from zero_inference.report.columns import COLUMNS
from zero_inference.report.runs import load_runs
from zero_inference.utils import write_benchmark_log
from zero_inference.utils.format import printable

ROOT = Path(__file__).resolve().parents[1]
FILES = sorted((ROOT / "benchmarks" / "results").glob("*/*.jsonl"))
REAL = [json.loads(line) for file in FILES for line in file.read_text().splitlines()]
RED = "\x1b[31mred\x1b[0m\x1b]0;title\x07\x9b2J\u202e"
ODD = (
    None,
    True,
    0,
    -1,
    2**63 - 1,
    2**63,
    2**200,
    10**400,
    1e300,
    -1e300,
    5e-324,
    -0.0,
    float("nan"),
    float("inf"),
    "",
    "x",
    "1e400",
    "9" * 5000,
    RED,
    "\ud800",
    "a\nb\r\tc",
    "<script>",
    "$\\frac{",
    [],
    {},
    [[]],
    ["a", None],
    {"a": 1},
    [{"name": RED}],
    [[[[[1]]]]],
    "ok",
    "failed",
)
NAMES = ("run", "ds-x-bs1-prompt2-gen3-n1x1-cpu", f"ds-x-bs{10**30}-prompt2-gen3-n{10**19}x9-cpu", "e\x1b[31m")


@pytest.fixture(scope="module")
def sweep():
    spec = importlib.util.spec_from_file_location("sweep", ROOT / "scripts" / "sweep.py")
    module = sys.modules["sweep"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def places(value, above=()):
    if above:
        yield above
    for key in value if isinstance(value, dict) else range(min(3, len(value))) if isinstance(value, list) else ():
        yield from places(value[key], (*above, key))


def mutated(draw: random.Random) -> bytes:
    record = copy.deepcopy(draw.choice(REAL))
    for _ in range(draw.choice((1, 1, 2, 5, 20))):
        *above, last = draw.choice(list(places(record)) or [("model",)])
        inside = record
        for key in above:
            inside = inside[key]
        if draw.random() < 0.25 and last in inside:
            del inside[last]
        else:
            inside[last] = copy.deepcopy(draw.choice(ODD))
    line = bytearray(json.dumps(record).encode())
    if draw.random() < 0.2:
        for _ in range(draw.choice((1, 30))):
            line[draw.randrange(len(line))] = draw.randrange(256)
    others = bytes(line[: draw.randrange(len(line))]), b"[" * 100000, b'{"a":' * 500 + b"1" + b"}" * 500
    return draw.choice((bytes(line),) * 8 + others)


def controls(text: str) -> str:
    return "".join(character for character in text if character not in "\n\t" and printable(character) != character)


@pytest.mark.parametrize("seed", range(8))
def test_mutated_records_end_no_reader_and_send_no_control_characters(seed, sweep, tmp_path, capsys):
    draw = random.Random(seed)
    for name in draw.sample(NAMES, 2):
        (tmp_path / f"{name}.jsonl").write_bytes(b"\n".join(mutated(draw) for _ in range(6)))
        write_benchmark_log(
            tmp_path / f"{name}.log", *(draw.choice((1.0, None, 1e300, -5, float("inf"))) for _ in range(10))
        )
    page = ["--html", tmp_path / "page.html"] if seed < 2 else []  # drawing takes long
    for format in ("table", "md", "csv", "json"):
        assert run_main(tmp_path, "--format", format, "--all-columns", "--sort", draw.choice(COLUMNS).name, *page) == 0
        page = []
    assert (
        sweep.main(
            ["--log-dir", str(tmp_path), "--launcher", "python", "--list", "--model", draw.choice(REAL)["model"]]
        )
        == 0
    )
    args, extra = sweep.parse_arguments(["--log-dir", str(tmp_path), "--launcher", "python", "--list"])
    for record in read_records(tmp_path):
        assert not any(case.is_request_of(record) for case in sweep.expand(args, extra))
    shown = capsys.readouterr()
    assert controls(shown.out + shown.err) == ""
    if seed < 2:
        assert controls((tmp_path / "page.html").read_text()) == ""


def test_lines_that_cannot_be_used_are_counted_in_one_line_and_the_rest_is_read(tmp_path, capsys):
    good = make_record()
    deep = json.dumps(good)[:-1] + ', "deep": ' + "[" * 40 + "]" * 40 + "}"
    lines = [
        b"[" * 100_000,
        json.dumps(good).encode(),
        deep.encode(),
        b"\xff\xfe",
        b"[1]",
        json.dumps(good).encode()[:-9],
    ]
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines))
    (tmp_path / "b\x1b[2J.jsonl").write_bytes(b"3\n")
    (tmp_path / "folder.jsonl").mkdir()
    assert read_records(tmp_path) == [good]
    first, second = capsys.readouterr().err.splitlines()
    assert first == f"{tmp_path / 'a.jsonl'}:1: skipped line nested deeper than 32, and 4 more lines of this file"
    assert second == f"{tmp_path}/b\ufffd[2J.jsonl:1: skipped line that is no JSON object"
    assert run_main(tmp_path) == 0 and "opt-66b" in capsys.readouterr().out


@pytest.mark.parametrize(
    "value, whole, amount",
    [
        (2**63 - 1, 2**63 - 1, float(2**63)),
        (2**63, 2**63, float(2**63)),
        (10**400, None, None),
        (1e300, None, None),
        (5e-324, None, None),
        ("odd", None, None),
        ([1], None, None),
        (None, None, None),
        (float("nan"), None, None),
        (0.0, 0, 0.0),
        (-7, -7, -7.0),
    ],
)
def test_numbers_that_no_run_has_are_not_known(value, whole, amount):
    record = Record.read({"batch_size": value, "load_s": value})
    assert (record.request.batch_size, record.result.measured.load_s) == (whole, amount)


def test_a_sweep_runs_a_case_again_whose_record_has_no_speed(sweep, tmp_path, capsys):
    argv = ["--log-dir", str(tmp_path), "--launcher", "python", "--list", "--model", "org/a"]
    args, extra = sweep.parse_arguments(argv)
    (case,) = sweep.expand(args, extra)
    asked = case.expected() | {
        "argv": ["run_model.py", *case.arguments()],
        "status": "ok",
        "dtype": "float32",
        "world_size": 1,
    }
    for odd in ({"total_throughput": "fast"}, {"total_throughput": 1e300}, {}, {"argv": 5, "total_throughput": 3.0}):
        (tmp_path / "a.jsonl").write_text(json.dumps(asked | odd) + "\n")
        assert sweep.main(argv) == 0
        shown = capsys.readouterr()
        assert ("org/a" in shown.out) == ("argv" not in odd) and ("skipped 1 record" in shown.err) == (
            "argv" not in odd
        ), odd


# A run that fails, and leaves the record that lies ready for its batch size.
LEAVES_A_RECORD = """
import pathlib, sys
batch, folder = (sys.argv[sys.argv.index(name) + 1] for name in ("--batch-size", "--log-dir"))
pathlib.Path(folder, f"{batch}.jsonl").write_bytes(pathlib.Path(__file__).with_name(batch).read_bytes())
sys.exit(1)
"""


def test_a_sweep_names_each_failed_case_whatever_its_record_says(sweep, tmp_path):
    (program := tmp_path / "program.py").write_text(LEAVES_A_RECORD)
    sizes = [str(place) for place in range(1, len(ODD) + 1)]
    argv = ["--program", program, "--log-dir", tmp_path / "logs", "--launcher", "python", "--batch-size", *sizes]
    args, extra = sweep.parse_arguments(list(map(str, argv)))
    for case, odd, size in zip(sweep.expand(args, extra), ODD, sizes, strict=True):
        facts = {"argv": ["run_model.py", *case.arguments()], "dtype": "float32", "world_size": 1}
        record = case.expected() | facts | {"status": "failed", "error": odd, "total_throughput": odd}
        (tmp_path / size).write_text(json.dumps(record) + "\n")
    command = [sys.executable, ROOT / "scripts" / "sweep.py", *argv]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=120)
    lines = [line for line in done.stderr.splitlines() if line.startswith("[")]
    assert done.returncode == 1 and len(lines) == len(ODD) and all(": failed: " in line for line in lines), done.stderr
    assert controls(done.stdout + done.stderr) == ""
    assert "red" in lines[ODD.index(RED)] and "a b c" in lines[ODD.index("a\nb\r\tc")], "what the record says"


def test_text_of_unknown_origin_is_fit_to_be_printed():
    assert (
        controls(printable(RED + "\x00\r\x7f\u2028\ud800")) == ""
        and printable("tab\tand\nline é日") == "tab\tand\nline é日"
    )


def test_thousands_of_blocks_without_their_records_are_read_at_once(tmp_path):
    """Each block was held against every record: 3000 of both took 25 s, and ten times as many more than half an hour."""
    line = json.dumps(make_record()) + "\n"
    (tmp_path / "run.jsonl").write_text(line * 4000)
    write_benchmark_log(tmp_path / "run.log", *range(10))
    block = (tmp_path / "run.log").read_text()
    (tmp_path / "run.log").write_text(block * 4000)
    start = time.process_time()
    assert len(load_runs(tmp_path)) == 8000
    assert time.process_time() - start < 10


def test_a_line_without_end_takes_no_more_memory_than_the_longest_record(tmp_path, monkeypatch, capsys):
    """A hole of any size in a file was read whole."""
    monkeypatch.setattr(read, "LONGEST_LINE", 1 << 20)
    line = (json.dumps(make_record()) + "\n").encode()
    for name in ("a.jsonl", "a.log"):
        (tmp_path / name).write_bytes(line if name == "a.jsonl" else b"")
        os.truncate(tmp_path / name, 64 << 20)
        with open(tmp_path / name, "ab") as file:
            file.write(b"\n" + line)
    tracemalloc.start()
    try:
        assert len(load_runs(tmp_path)) == 2
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()
    assert f"{tmp_path / 'a.jsonl'}:2: skipped line that is no JSON object" in capsys.readouterr().err


def test_a_file_name_with_a_line_break_makes_no_second_line(tmp_path, capsys):
    (tmp_path / "x\nerror: something else.jsonl").write_text("no record\n")
    load_runs(tmp_path)
    assert len(capsys.readouterr().err.splitlines()) == 1
