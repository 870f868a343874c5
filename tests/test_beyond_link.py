import csv
import json

import pytest

from benchmarks import beyond_link

# Stands for run_model.py: a record of a step of 0.1 s, half as long with the cores; `--extra` makes it fail or hang.
PROGRAM = """
import json, sys, time
value = {name: sys.argv[i + 1] for i, name in enumerate(sys.argv[:-1]) if name.startswith("--")}
if "--fail" in sys.argv:
    sys.exit("error: no such thing")
time.sleep(60 if "--hang" in sys.argv else 0)
step_s = 0.05 if value.get("--cpu-compute") == "auto" else 0.1
record = dict(status="ok", model=value["--model"], engine=value["--engine"], quant_bits=int(value.get("--quant-bits", 16)))
record |= dict(batch_size=1, gen_len=32, decode_latency_s=31 * step_s, decode_throughput=1 / step_s, weight_bytes=7 * 10**9)
record |= dict(load_s=1.0, transfers=dict(host_to_device_bytes_per_step=5 * 10**9), limit=dict(bound_by="link", fraction_of_limit=0.9))
record |= dict(argv=sys.argv[1:])
open(value["--log-file"].removesuffix(".log") + ".jsonl", "a").write(json.dumps(record) + "\\n")
"""


@pytest.fixture
def program(tmp_path):
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return path


def run(results, program, *arguments):
    return beyond_link.main([str(results), "--program", str(program), *arguments])


def table(results):
    with (results / "table.tsv").open() as file:
        return {(row["case"], row["batch"]): row for row in csv.DictReader(file, delimiter="\t")}


def test_cases_leave_records_and_a_table(tmp_path, program):
    results = tmp_path / "results"
    assert run(results, program, "llama13b-int4-bs1-off", "llama13b-int4-bs1-auto", "--threads", "3") == 0
    rows = table(results)
    auto = rows["llama13b-int4-bs1-auto", "1"]
    assert float(auto["tokens_per_s"]) == pytest.approx(20) and float(auto["step_s"]) == pytest.approx(0.05)
    assert float(auto["weights_gb_per_s"]) == pytest.approx(140)
    assert float(auto["over_link_gb_per_s"]) == pytest.approx(100)
    assert float(auto["times_off"]) == pytest.approx(2) and rows["llama13b-int4-bs1-off", "1"]["times_off"] == ""
    asked = {
        name: json.loads((results / f"llama13b-int4-bs1-{name}.jsonl").read_text())["argv"] for name in ("off", "auto")
    }
    assert asked["auto"][asked["auto"].index("--cpu-threads") + 1] == "3" and "--cpu-threads" not in asked["off"]
    assert (results / "table.md").read_text().count("\n") == 4


def test_a_case_that_fails_is_named_and_the_others_go_on(tmp_path, program, capsys):
    names = ["llama13b-int4-bs1-off", "llama13b-int4-bs8-off"]
    assert run(tmp_path / "results", program, *names, "--extra=--fail") == 1
    said = capsys.readouterr().err
    assert all(f"{name}: failed (1): error: no such thing" in said for name in names)


def test_a_case_that_hangs_is_ended(tmp_path, program, capsys, monkeypatch):
    monkeypatch.setattr(beyond_link, "AT_LEAST_S", 1)
    monkeypatch.setattr(beyond_link, "TIMES_AS_LONG", 0.01)
    assert run(tmp_path / "results", program, "llama13b-int4-bs1-off", "--extra=--hang") == 1
    assert "llama13b-int4-bs1-off: ended as it took longer than 1 s" in capsys.readouterr().err


def test_what_the_limit_leaves_no_time_for_is_left_out(tmp_path, program, capsys):
    assert run(tmp_path / "results", program, "llama405b-int4-bs1-off", "llama13b-int4-bs1-off", "--limit-s", "60") == 1
    expected = beyond_link.CASES["llama405b-int4-bs1-off"].estimate_s
    assert (
        expected > 110
        and f"llama405b-int4-bs1-off: left out, estimated {expected:.0f} s of 60 s" in capsys.readouterr().err
    )
    assert set(table(tmp_path / "results")) == {("llama13b-int4-bs1-off", "1")}


def test_llama_cpp_has_a_row_a_batch_in_the_table(tmp_path):
    rows = [dict(batch=1, tokens_per_s=10.0, step_s=0.1), dict(batch=8, tokens_per_s=40.0, step_s=0.2)]
    found = dict(
        model="meta-llama/Llama-2-13b-hf", version="llama.cpp 1", threads=15, weight_bytes=7 * 10**9, rows=rows
    )
    (tmp_path / "llamacpp-llama13b.json").write_text(json.dumps(found))
    assert beyond_link.main([str(tmp_path), "--table"]) == 0
    assert table(tmp_path)["llamacpp-llama13b", "8"]["weights_gb_per_s"] == "35.0"


@pytest.mark.parametrize(
    "arguments, words", [(["no-such"], "no case 'no-such'"), (["llamacpp-mixtral"], "llamacpp-mixtral needs --source")]
)
def test_what_cannot_run_is_refused(arguments, words, tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        beyond_link.main([str(tmp_path), *arguments])
    assert ended.value.code == 2 and words in capsys.readouterr().err


def test_every_option_is_one_that_run_model_knows_or_of_the_cores():
    import argparse

    from zero_inference.cli import add_run_arguments

    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_run_arguments(parser)
    for name, case in beyond_link.CASES.items():
        if not case.peer:
            unknown = parser.parse_known_args(f"{beyond_link.COMMON} {case.options}".split())[1]
            assert unknown in ([], unknown[:2]) and unknown[:1] in ([], ["--cpu-compute"]), name
