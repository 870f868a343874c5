"""scripts/measure_gpu.py runs cases of a file within a time limit, and leaves a folder that can be committed."""

from __future__ import annotations

import json
import re
import shlex
import sys

import pytest
import yaml
from conftest import ROOT

from benchmarks.peers import llama_cpp

sys.path.insert(0, str(ROOT / "scripts"))
import measure_gpu  # noqa: E402

SHORT = "--prompt-len 8 --gen-len 3 --loops 1 --warmup 0"
TINY = f"""
tiny:
  planned: 9 plan opt-125m --machine rtx4090 --engine stream --batch-size 1 --quant-bits 4 --prompt-len 8 -- {SHORT}
  two: 9 run opt-125m --engine resident {SHORT} & -c "print('in RESULTS')"
  peer: 9 llama_cpp --model llama-3.2-1b
"""
QUICK = """
quick:
  says: 1 -c "print('measured')"
  hangs: 1 -c "import time; time.sleep(60)"
others:
  long: 50 -c "print(1)"
  says:
"""
LOST = "group:\n  says: 1 -c 'import no_such_module'\n"


def measure(folder, text, *arguments):
    cases = folder.parent / "cases.yaml"
    cases.write_text(text)
    return measure_gpu.main([str(folder), "--cases", str(cases), *arguments])


def test_cases_leave_what_can_be_committed(tmp_path, capsys):
    results = tmp_path / "the results"
    assert measure(results, TINY, "tiny") == 1
    assert "left (no time, or no --llama): peer\n" in capsys.readouterr().err
    kinds = [("planned", "jsonl plan.json txt"), ("two", "jsonl txt")]
    names = {f"{case}.{kind}" for case, kinds_of in kinds for kind in kinds_of.split()}
    assert {path.name for path in results.iterdir()} == {*names, "steps.txt", "table.md"}
    record, plan = (json.loads((results / f"planned.{kind}").read_text()) for kind in ("jsonl", "plan.json"))
    assert plan["configurations"][0]["command"].endswith(" --engine stream --quant-bits 4 --dummy --prompt-len 8")
    assert (record["engine"], record["quant_bits"], record["gen_len"], record["status"]) == ("stream", 4, 3, "ok")
    assert record["argv"][record["argv"].index("--log-file") + 1] == "RESULTS/planned.log"
    assert "in RESULTS\n" in (results / "two.txt").read_text()
    assert re.fullmatch(r"(planned|two) \d+ s, exit code 0\n" * 2, (results / "steps.txt").read_text())
    assert not any(str(folder) in path.read_text() for path in results.iterdir() for folder in (ROOT, tmp_path))


def test_a_case_that_fails_or_hangs_takes_nothing_away(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(measure_gpu, "AT_LEAST_S", 10)
    results = tmp_path / "results"
    assert measure(results, QUICK, "others", "--limit-s", "40") == 1
    assert (results / "says.txt").read_text() == "measured\n" and not (results / "long.txt").exists()
    assert capsys.readouterr().err.endswith("left (no time, or no --llama): long\n")
    assert measure(results, LOST, "group") == 1
    assert (results / "says.txt").read_text() == "measured\n" and "no_such_module" in (
        results / "says.part"
    ).read_text()
    assert measure(results, QUICK, "quick") == 1
    assert capsys.readouterr().err.endswith("failed: hangs\n") and not (results / "says.part").exists()
    assert [line.split()[-1] for line in (results / "steps.txt").read_text().splitlines()] == ["0", "1", "0", "124"]


def test_a_case_that_is_not_there_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        measure(tmp_path / "results", QUICK, "no-such")
    assert ended.value.code == 2 and "no case 'no-such'; there are quick, others, says" in capsys.readouterr().err


def test_every_command_is_one_that_its_program_takes(tmp_path, monkeypatch):
    from zero_inference.cli import console_parser
    from zero_inference.config.run_options import parse_options

    groups = yaml.safe_load((ROOT / "scripts" / "measure_gpu.yaml").read_text())
    (tmp_path / "llama_cpp_python-1.tar.gz").touch()
    args, cases = measure_gpu.parse_args([str(tmp_path), *groups, "--llama", str(tmp_path)])
    for name, (_, lines) in cases.items():
        for line in lines:
            program, *options = measure_gpu.command_of(line, name, args)[1:]
            kind = line.split()[0]
            if kind == "run":
                parse_options(options)
            elif kind == "llama_cpp":
                monkeypatch.setattr(sys, "argv", [program, *options])
                assert llama_cpp.parse_args().model
            elif program == "-m":
                assert options.pop(0) == "zero_inference"
                console_parser(["zero-inference", *options], []).parse_args(options)
            else:
                assert (ROOT / program).is_file()
            if kind == "plan":
                parse_options([*measure_gpu.RUN, *shlex.split(line.partition(" -- ")[2]), "--model", options[1]])
