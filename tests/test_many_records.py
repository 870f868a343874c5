"""The readers of logs and records take time and memory in proportion to what they read."""

from __future__ import annotations

import json
import os
import time
import tracemalloc

from test_report import make_record

from zero_inference.records import read
from zero_inference.report.runs import load_runs
from zero_inference.utils import write_benchmark_log


def test_thousands_of_blocks_without_their_records_are_read_at_once(tmp_path):
    """Each block was held against every record: 3000 of both took 25 s, and ten times as many more than half an hour."""
    line = json.dumps(make_record()) + "\n"
    (tmp_path / "run.jsonl").write_text(line * 4000)
    write_benchmark_log(tmp_path / "run.log", *range(10))
    block = (tmp_path / "run.log").read_text()
    (tmp_path / "run.log").write_text(block * 4000)
    start = time.monotonic()
    assert len(load_runs(tmp_path)) == 8000
    assert time.monotonic() - start < 10


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
