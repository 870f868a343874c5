"""The readers of logs and records take time and memory in proportion to what they read."""

from __future__ import annotations

import json
import time

from test_report import make_record

from zero_inference.report import load_records
from zero_inference.utils import write_benchmark_log


def test_thousands_of_blocks_without_their_records_are_read_at_once(tmp_path):
    """Each block was held against every record: 3000 of both took 25 s, and ten times as many more than half an hour."""
    line = json.dumps(make_record()) + "\n"
    (tmp_path / "run.jsonl").write_text(line * 4000)
    write_benchmark_log(tmp_path / "run.log", *range(10))
    block = (tmp_path / "run.log").read_text()
    (tmp_path / "run.log").write_text(block * 4000)
    start = time.monotonic()
    assert len(load_records(tmp_path)) == 8000
    assert time.monotonic() - start < 10
