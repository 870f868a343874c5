"""scripts/measure_gpu.sh takes any folder, and keeps what an earlier start measured."""

from __future__ import annotations

import os
import subprocess

from conftest import ROOT


def measure(folder, *cases, **environment):
    return subprocess.run(
        ["bash", ROOT / "scripts" / "measure_gpu.sh", folder, *cases],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_a_folder_with_spaces_is_one_word(tmp_path):
    done = measure(tmp_path / "the results", "opt13b-fp16-stream", LAUNCH="printf <%s>\\n")
    assert done.returncode == 0, done
    for option, name in (("--log-file", "opt13b-fp16-stream.log"), ("--trace", "opt13b-fp16-stream.trace.json")):
        assert f"<{option}>\n<{tmp_path}/the results/{name}>\n" in done.stdout


def test_a_case_that_fails_takes_nothing_away(tmp_path):
    (tmp_path / "python3").write_text('#!/bin/sh\necho "$@"\nexit $CODE\n')
    (tmp_path / "python3").chmod(0o755)
    results = tmp_path / "the results"
    results.mkdir()
    (results / "link.txt").write_text("measured\n")
    path = f"{tmp_path}:{os.environ['PATH']}"
    assert measure(results, "link", PATH=path, CODE="3").returncode == 1
    assert (results / "link.txt").read_text() == "measured\n"
    assert measure(results, "link", PATH=path, CODE="0").returncode == 0
    assert (results / "link.txt").read_text() == f"-m zero_inference link --disk {results}\n"
