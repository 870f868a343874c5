"""Readers of logs and records meet anything: damaged lines, foreign values, hostile text. Seeded mutations of committed records."""

from __future__ import annotations

import copy
import importlib
import json
import random
import sys
from pathlib import Path

import pytest
from test_report import make_record

from zero_inference.cli import console_main
from zero_inference.records.read import read_records
from zero_inference.records.schema import Record
from zero_inference.report.columns import COLUMNS
from zero_inference.report.run import load_runs
from zero_inference.utils import write_benchmark_log
from zero_inference.utils.format import printable

ROOT = Path(__file__).resolve().parents[1]
FILES = sorted((ROOT / "benchmarks" / "results").glob("*/*.jsonl"))
REAL = [json.loads(line) for file in FILES for line in file.read_text().splitlines()]
RED = "\x1b[31mred\x1b[0m\x1b]0;title\x07\x9b2J\u202e"
ODD = (
    *(None, True, 0, -1, 2**63 - 1, 2**200, 10**400, 1e300, -1e300, 5e-324, -0.0, float("nan"), float("inf")),
    *("", "x", "1e400", "9" * 5000, RED, "\ud800", "a\nb\r\tc", "<script>", "$\\frac{", "ok", "failed"),
    *([], {}, [[]], ["a", None], {"a": 1}, [{"name": RED}], [[[[[1]]]]]),
)
NAMES = ("run", "ds-x-bs1-prompt2-gen3-n1x1-cpu", f"ds-x-bs{10**30}-prompt2-gen3-n{10**19}x9-cpu", "e\x1b[31m")


@pytest.fixture(scope="module")
def sweep():
    sys.path.insert(0, str(ROOT / "scripts"))
    return importlib.import_module("sweep")


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


@pytest.mark.parametrize("seed", range(6))
def test_mutated_records_end_no_reader_and_send_no_control_characters(seed, sweep, tmp_path, capsys):
    draw = random.Random(seed)
    for name in draw.sample(NAMES, 2):
        lines = [mutated(draw) for _ in range(6)]
        (tmp_path / f"{name}.jsonl").write_bytes(b"\n".join([json.dumps(draw.choice(REAL)).encode(), *lines]))
        values = (draw.choice((1.0, None, 1e300, -5, float("inf"))) for _ in range(10))
        write_benchmark_log(tmp_path / f"{name}-old.log", *values)
    for format in ("table", "md", "csv", "json"):
        words = ["--format", format, "--all-columns", "--sort", draw.choice(COLUMNS).name]
        words += ["--html", str(tmp_path / "page.html")] if seed < 2 and format == "table" else []  # drawing takes long
        assert console_main(["zero-inference", "report", str(tmp_path), *words]) == 0
    assert console_main(["zero-inference", "report", str(tmp_path)]) == 0
    listing = ["--log-dir", str(tmp_path), "--launcher", "python", "--list"]
    assert sweep.main([*listing, "--model", draw.choice(REAL)["model"]]) == 0
    shown = capsys.readouterr()
    assert controls(shown.out + shown.err) == ""
    if seed < 2:
        assert controls((tmp_path / "page.html").read_text()) == ""


def test_lines_that_cannot_be_used_are_counted_in_one_line_and_the_rest_is_read(tmp_path, capsys):
    good = make_record()
    line = json.dumps(good).encode()
    lines = [b"[" * 100_000, line, b"\xff\xfe", b"[1]", b'{"a":' * 500 + b"1" + b"}" * 500, line[:-9]]
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines))
    (tmp_path / "b\x1b[2J\nerror: x.jsonl").write_bytes(b"3\n")
    (tmp_path / "folder.jsonl").mkdir()
    assert read_records(tmp_path) == [good]
    first, second = capsys.readouterr().err.splitlines()
    assert first == f"{tmp_path / 'a.jsonl'}:1: skipped line that is no JSON object, and 4 more lines of this file"
    assert second == f"{tmp_path}/b\ufffd[2J\ufffderror: x.jsonl:1: skipped line that is no JSON object"
    assert [run.request.batch_size for run in load_runs(tmp_path)] == [7]


def test_numbers_that_no_run_has_are_not_known():
    def read(value):
        record = Record.read({"batch_size": value, "load_s": value})
        return record.request.batch_size, record.result.measured.load_s

    for odd in (10**400, 1e300, 5e-324, "odd", [1], float("nan")):
        assert read(odd) == (None, None), odd
    assert [read(value) for value in (2**63, 0.0, -7)] == [(2**63, float(2**63)), (0, 0.0), (-7, -7.0)]


def test_a_sweep_runs_a_case_again_whose_record_has_no_speed(sweep, tmp_path, capsys):
    argv = ["--log-dir", str(tmp_path), "--launcher", "python", "--list", "--model", "org/a"]
    (case,) = sweep.expand(*sweep.parse_arguments(argv))
    record = {"argv": ["run_model.py", *case.arguments], "status": "ok"}
    for odd in ({"total_throughput": "fast"}, {"total_throughput": 1e300}, {}, {"argv": 5, "total_throughput": 3.0}):
        (tmp_path / "a.jsonl").write_text(json.dumps(record | odd) + "\n")
        assert sweep.main(argv) == 0 and "org/a" in capsys.readouterr().out, odd
    (tmp_path / "a.jsonl").write_text(json.dumps(record | {"total_throughput": 3.0}) + "\n")
    assert sweep.main(argv) == 0 and "org/a" not in capsys.readouterr().out
