"""The report reads what runs wrote: records, blocks of older tools, and both of one run once."""

import csv
import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import write_record

from zero_inference.cli import console_main
from zero_inference.errors import UsageError
from zero_inference.report import command
from zero_inference.report.columns import BY_NAME, COLUMNS, differing_columns
from zero_inference.report.run import Run
from zero_inference.report.runs import load_runs, parse_log_name
from zero_inference.report.terminal import short_table
from zero_inference.utils import GB, get_filename, write_benchmark_log
from zero_inference.utils.tables import render

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"


def make_record(**changes):
    record = {
        "status": "ok", "timestamp": "2026-03-01T10:00:00+00:00", "argv": ["run_model.py"], "engine": "deepspeed",
        "model": "facebook/opt-66b", "model_type": "opt", "dtype": "float16", "world_size": 1, "num_nodes": 1,
        "batch_size": 7, "prompt_len": 129, "gen_len": 33, "quant_bits": 16, "quant_group_size": 64,
        "cpu_offload": True, "disk_offload": False, "kv_offload": False, "norm_kernels": "off", "dummy": False,
        "model_bytes": 131399321792, "cache_bytes": 2**60 + 1, "hidden_bytes": 3, "weight_bytes": 5, "load_s": 1.0,
        "cold_total_s": None, "loops": [], "prefill_latency_s": 1 / 3, "prefill_throughput": 100.1,
        "decode_latency_s": 2.0, "decode_throughput": 10 / 3, "total_latency_s": 7 / 3, "total_throughput": 9.1234567,
        "peak_gpu_bytes": 12 * GB, "peak_host_bytes": None, "output_ids_sha256": "ab",
        "transfers": None, "limit": {"link_gbps": 55.4, "floor_decode_s": 1.5, "fraction_of_limit": 0.7512},
        "ds_config": None, "environment": {"gpus": [{"name": "H"}, {"name": "H"}], "git_commit": "0" * 40},
    }  # fmt: skip
    return record | changes


def log_block(folder, name, record):
    write_benchmark_log(
        folder / f"{name}.log",
        *(
            record[key]
            for key in (
                "model_bytes", "cache_bytes", "hidden_bytes", "peak_gpu_bytes", "prefill_latency_s",
                "prefill_throughput", "decode_latency_s", "decode_throughput", "total_latency_s", "total_throughput",
            )
        ),
    )  # fmt: skip


def values(runs, name):
    return [BY_NAME[name].value(run) for run in runs]


def names_of(columns):
    return [column.name for column in columns]


def run_main(*words):
    import argparse

    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return command.main(parser.parse_args([str(word) for word in words]))


def test_a_run_with_block_and_record_is_listed_once(tmp_path):
    record = make_record()
    log_block(tmp_path, "Qwen2.5-x", record)
    write_record(tmp_path / "Qwen2.5-x.jsonl", record)
    runs = load_runs(tmp_path)
    assert values(runs, "file") == ["Qwen2.5-x.jsonl"]
    assert values(runs, "total_throughput") == [9.1234567]


def test_a_repeated_run_and_an_old_block_in_the_same_log_are_told_apart(tmp_path):
    old = make_record(total_throughput=8.0)
    name = get_filename("facebook/opt-66b", 7, 129, 33, True, False, 1, 1, False, False)
    for record in (old, make_record(), make_record()):
        log_block(tmp_path, name, record)
    for record in (make_record(), make_record(), make_record(status="failed", error="out of\nmemory")):
        write_record(tmp_path / f"{name}.jsonl", record)
    runs = load_runs(tmp_path)
    assert values(runs, "status") == ["ok", "ok", "failed", "ok"]
    assert values(runs, "file") == [f"{name}.jsonl"] * 3 + [f"{name}.log"]
    assert values(runs, "total_throughput")[3] == 8.0


def test_blocks_without_decode_match_their_record(tmp_path):
    record = make_record(gen_len=1, decode_throughput=None)
    log_block(tmp_path, "a", record)
    write_record(tmp_path / "a.jsonl", record)
    assert len(load_runs(tmp_path)) == 1


@pytest.mark.parametrize("cpu, disk", [(True, False), (False, True), (False, False)])
@pytest.mark.parametrize("kv, quantized", [(False, False), (True, False), (False, True), (True, True)])
def test_log_names_are_parsed_back(cpu, disk, kv, quantized):
    name = get_filename("org/my-bs3-model-7b", 24, 513, 31, cpu, disk, 2, 3, kv, quantized, prefix="stream")
    assert parse_log_name(name) == {
        "model": "my-bs3-model-7b", "engine": "stream", "num_nodes": 2, "world_size": 6, "batch_size": 24,
        "prompt_len": 513, "gen_len": 31, "quant_bits": None if quantized else 16,
        "weight_quantize": True if quantized else None, "cpu_offload": cpu, "disk_offload": disk, "kv_offload": kv,
    }  # fmt: skip


def test_logs_of_older_tools_say_what_name_and_block_say(tmp_path):
    log_block(tmp_path, get_filename("opt-66b", 7, 129, 33, False, True, 1, 2, False, True), make_record())
    log_block(tmp_path, "my own name", make_record(decode_throughput=None))
    row, own = ({column.name: column.value(run) for column in COLUMNS} for run in load_runs(tmp_path))
    assert (row["engine"], row["world_size"]) == ("deepspeed", 2)
    assert row["disk_offload"] is True and row["weight_quantize"] is True
    assert row["total_throughput"] == 9.123 and row["peak_gpu_bytes"] == 12 * GB
    assert own["model"] == "my own name"


def test_only_columns_that_tell_runs_apart_are_kept(tmp_path):
    write_record(tmp_path / "a.jsonl", make_record())
    write_record(tmp_path / "a.jsonl", make_record(quant_bits=4, timestamp="later", load_s=2.0))
    always = ["model", "engine", "total_throughput", "decode_throughput", "decode_weights_gbps", "prefill_latency_s"]
    always += ["fraction_of_limit", "bound_by", "peak_gpu_bytes"]
    runs = load_runs(tmp_path)
    assert set(names_of(differing_columns(runs))) == {*always, "quant_bits", "weights"}
    assert names_of(differing_columns(runs[:1])) == always
    write_record(tmp_path / "a.jsonl", make_record(status="failed", error="no room", quant_bits=8, dtype=None))
    # that the failed run knew no dtype is no difference
    assert set(names_of(differing_columns(load_runs(tmp_path)))) == {
        *always,
        "quant_bits",
        "weights",
        "error",
    }
    log_block(tmp_path, get_filename("opt-66b", 7, 129, 33, True, False, 1, 1, False, True), make_record())
    assert {"dtype", "weight_quantize"} < set(names_of(differing_columns(load_runs(tmp_path))))


def test_csv_and_json_keep_every_digit_in_si_units(tmp_path):
    write_record(tmp_path / "a.jsonl", make_record())
    write_record(tmp_path / "a.jsonl", make_record(status="failed", error="x", limit=None, decode_throughput=None))
    runs = load_runs(tmp_path)
    first, second = csv.DictReader(io.StringIO(render(runs, COLUMNS, "csv")))
    assert float(first["prefill_latency_s"]) == 1 / 3 and first["model_bytes"] == "131399321792"
    assert first["cache_bytes"] == str(2**60 + 1) and second["fraction_of_limit"] == ""
    first, second = json.loads(render(runs, COLUMNS, "json"))
    assert first["decode_throughput"] == 10 / 3 and first["cache_bytes"] == 2**60 + 1
    assert first["cpu_offload"] is True and second["decode_throughput"] is None and first["peak_host_bytes"] is None


def test_table_has_units_and_shows_failures_in_red_on_one_line(tmp_path):
    write_record(tmp_path / "a.jsonl", make_record(model="a[b]"))
    failed = make_record(status="failed", error="asked 1\n found [red]", total_throughput=None)
    write_record(tmp_path / "a.jsonl", failed)
    runs = load_runs(tmp_path)
    columns = differing_columns(runs)
    header, _, first, second = render(runs, columns, "table").splitlines()
    assert "total (token/s)" in header and "peak GPU (GiB)" in header
    assert first.split()[:3] == ["a[b]", "deepspeed", "9.12"] and " 75.1 " in first and "12.0" in first
    assert second.endswith("asked 1 found [red]")
    # Right-aligned: the digits end where the header does.
    assert first.index("12.0") + len("12.0") == header.index("peak GPU (GiB)") + len("peak GPU (GiB)")
    assert "\x1b[31masked 1 found [red]" in render(runs, columns, "table", colour=True)


def test_a_narrow_terminal_loses_no_digit(tmp_path):
    write_record(tmp_path / "a.jsonl", make_record())
    runs = load_runs(tmp_path)
    text = render(runs, differing_columns(runs), "table", width=30)
    assert all(len(line) <= 30 for line in text.splitlines()) and "…" not in text


def test_markdown_is_a_table_with_escaped_bars(tmp_path):
    write_record(tmp_path / "a.jsonl", make_record(model="a|b"))
    runs = load_runs(tmp_path)
    header, rule, row = render(runs, differing_columns(runs), "md").splitlines()
    assert header.count("|") == rule.count("|") == row.count("|") - 1
    assert r"a\|b" in row and "9.12" in row and "link" in row


def test_every_column_prints_in_every_format(tmp_path):
    write_record(tmp_path / "a.jsonl", make_record(peak_host_bytes=1, cold_total_s=1.0))
    runs = load_runs(tmp_path)
    (of_csv,), (of_json,) = (
        csv.DictReader(io.StringIO(render(runs, COLUMNS, "csv"))),
        json.loads(render(runs, COLUMNS, "json")),
    )
    assert list(of_csv) == list(of_json) == [column.name for column in COLUMNS]
    assert "2 x H" in render(runs, COLUMNS, "table") and "2 x H" in render(runs, COLUMNS, "md")
    with pytest.raises(ValueError, match="xml"):
        render(runs, COLUMNS, "xml")


def test_throughput_sorts_best_first_and_latency_ascending(tmp_path, capsys):
    for index, speed in enumerate((2.0, None, 3.0)):
        status = {"status": "failed", "error": "x"} if speed is None else {}
        record = make_record(total_throughput=speed, prefill_latency_s=speed, batch_size=index, **status)
        write_record(tmp_path / "a.jsonl", record)
    orders = {}
    for column in ("total-throughput", "prefill_latency_s"):
        assert run_main(tmp_path, "--format", "json", "--sort", column) == 0
        orders[column] = [row["batch_size"] for row in json.loads(capsys.readouterr().out)]
    assert orders == {"total-throughput": [2, 0, 1], "prefill_latency_s": [0, 2, 1]}
    with pytest.raises(SystemExit) as stopped:
        run_main(tmp_path, "--sort", "speed")
    assert stopped.value.code == 2 and "total_throughput" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        console_main(["zero-inference", "report", str(tmp_path), "--sort", "total-througput"])
    assert capsys.readouterr().err == "error: --sort total_througput: did you mean total_throughput?\n"


def test_all_columns_adds_those_in_which_runs_agree(tmp_path, capsys):
    write_record(tmp_path / "a.jsonl", make_record())
    run_main(tmp_path, "--format", "json")
    assert "weight_bytes" not in json.loads(capsys.readouterr().out)[0]
    run_main(tmp_path, "--format", "json", "--all-columns")
    assert json.loads(capsys.readouterr().out)[0]["weight_bytes"] == 5


def test_nothing_to_report_is_said_and_is_exit_code_2(tmp_path, capsys):
    assert run_main(tmp_path) == 2
    assert (
        f"no run in the .log and .jsonl files of {tmp_path}; python run_model.py ... makes one"
        in capsys.readouterr().err
    )
    (tmp_path / "a.log").write_text("")
    for name, what in (("gone", "does not exist"), ("a.log", "is a file, not a folder")):
        with pytest.raises(UsageError, match=what):
            run_main(tmp_path, tmp_path / name)
    assert run_main(tmp_path) == 2
    assert "no run in" in capsys.readouterr().err


def test_a_damaged_file_does_not_hide_the_others(tmp_path, capsys):
    (tmp_path / "bad.jsonl").write_text('{"status": "ok"\n[1]\n')
    (tmp_path / "bad.log").write_text("model size: 1 GB\nnonsense\n")
    odd = make_record(limit="odd", batch_size="odd", load_s=float("inf"), gen_len="1e3")
    (tmp_path / "good.jsonl").write_text(json.dumps(odd) + "\n")
    assert run_main(tmp_path) == 0
    shown = capsys.readouterr()
    assert "opt-66b" in shown.out and "bad.jsonl" in shown.err


def test_importing_the_report_loads_no_heavy_package():
    for module, heavy in (
        ("report.command", {"pandas", "torch", "rich", "numpy"}),
        ("report.html.page", {"pandas", "torch"}),
    ):
        code = f"import sys, zero_inference.{module}; print({heavy} & set(sys.modules))"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert done.stdout.strip() == "set()"


def test_quality_stands_in_the_row_of_its_run(tmp_path):
    quality = {
        "mmlu": {"accuracy": 0.3125, "stderr": 0.058},
        "hellaswag": {"accuracy": 0.5, "stderr": 0.25, "acc_norm": 0.75, "acc_norm_stderr": 0.125},
        "humaneval": {"pass_at_k": {"1": 0.2}, "stderr": {"1": 0.03}},
        "perplexity": {"perplexity": 12.5, "stderr": None},
    }
    write_record(tmp_path / "a.jsonl", make_record(quant_bits=4, quality=quality))
    write_record(tmp_path / "b.jsonl", make_record(quality=None))
    runs = load_runs(tmp_path)
    columns = differing_columns(runs)
    row = {column.name: column.value(runs[0]) for column in columns}
    assert (row["mmlu_accuracy"], row["mmlu_stderr"]) == (0.3125, 0.058)
    assert (row["hellaswag_accuracy"], row["hellaswag_acc_norm"], row["humaneval_pass_at_1"]) == (0.5, 0.75, 0.2)
    assert row["perplexity"] == 12.5 and "perplexity_stderr" not in row
    assert "31.2" in render(runs, columns, "md")


def test_decode_time_stands_beside_its_prediction_where_a_record_has_one(tmp_path, capsys):
    def printed(format):
        assert run_main(tmp_path, "--format", format) == 0
        return capsys.readouterr().out

    write_record(tmp_path / "a.jsonl", make_record(predicted=None))
    assert "predicted" not in printed("table") and "decode_over_predicted" not in json.loads(printed("json"))[0]
    write_record(tmp_path / "b.jsonl", make_record(predicted={"decode_s": 1.6, "prefill_s": None}))
    write_record(tmp_path / "c.jsonl", make_record(predicted={"decode_s": None, "prefill_s": 0.3}))
    ratios = [row["decode_over_predicted"] for row in json.loads(printed("json"))]
    assert ratios == [None, 1.25, None]
    assert "decode_over_predicted" in printed("csv").splitlines()[0].split(",")
    header, _, *rows = ([cell.strip() for cell in line.split("|")] for line in printed("md").splitlines())
    assert [row[header.index("decode / predicted")] for row in rows] == ["-", "1.25", "-"]


def test_predictions_that_no_plan_makes_give_no_ratio(tmp_path):
    odd = (0, -1.6, "x", None, [], float("nan"), {"s": 1.6}, 1e300)
    with (tmp_path / "a.jsonl").open("w") as file:
        for predicted in (3, "odd", [], *({"decode_s": value} for value in odd)):
            file.write(json.dumps(make_record(predicted=predicted)) + "\n")
    for measured in (None, 0.0, -2.0, "x"):
        write_record(tmp_path / "b.jsonl", make_record(predicted={"decode_s": 2.5}, decode_latency_s=measured))
    runs = load_runs(tmp_path)
    assert len(runs) == 15 and set(values(runs, "decode_over_predicted")) == {None}
    assert "decode_over_predicted" not in names_of(differing_columns(runs))


def test_the_ratio_of_committed_runs_is_that_of_the_prediction_report():
    folder = Path(__file__).parents[1] / "benchmarks" / "results" / "h200-beside"
    found = {run.file: run.time_over_predicted("decode_s") for run in load_runs(folder)}
    # from prediction.txt, which `report --prediction` wrote
    said = {"deepspeed13b-int4": 49.8, "llama13b-bf16-bs1-auto": 3.3, "llama70b-int4-20gib-bs1-auto": -7.2}
    for name, percent in said.items():
        assert 100 * (found[f"{name}.jsonl"] - 1) == pytest.approx(percent, abs=0.05)
    assert sum(ratio is not None for ratio in found.values()) == 8


def printed(capsys, *words):
    assert run_main(*words) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("folder", ["h200-beside", "h200-shared", "h200-fixed", "h200-kept", "."])
def test_the_table_of_any_committed_folder_is_at_most_a_hundred_columns_wide(folder, capsys):
    lines = printed(capsys, RESULTS / folder).splitlines()
    assert max(map(len, lines)) <= 100
    assert any("token/s" in line for line in lines[:4])
    assert "hidden for width" in " ".join(lines[-4:]) and "--all-columns" in " ".join(lines[-4:])


def test_what_all_runs_share_is_said_once_and_results_come_first(tmp_path, capsys):
    for quant_bits, speed in ((16, 15.4321), (4, 61.2)):
        write_record(tmp_path / "a.jsonl", make_record(quant_bits=quant_bits, decode_throughput=speed, pin_memory=True))
    shared, *head, rule, first, second = printed(capsys, tmp_path).splitlines()
    assert shared == "all: opt-66b, deepspeed, host, batch 7, prompt 129, 33 generated, 2 x H"
    assert head[-1].split()[0] == "token/s" and set(rule) == {"-"}
    fastest, slower = first.split(), second.split()
    assert (fastest[:3], slower[:3]) == (["61.2", "75.1%", "link"], ["15.4", "75.1%", "link"])
    assert fastest[-1] == "int4" and slower[-1] == "fp16" and "62.5 ms" in first, "the step"
    alone = tmp_path / "alone"
    alone.mkdir()
    write_record(alone / "a.jsonl", make_record())
    assert printed(capsys, alone).startswith("opt-66b, deepspeed, fp16, host, batch 7")


def test_where_joins_offload_page_locking_and_the_cache(tmp_path, capsys):
    for number, (changes, _) in enumerate(WHERE):
        write_record(tmp_path / "a.jsonl", make_record(decode_throughput=100.0 - number, **changes))
    head, _, *lines = printed(capsys, tmp_path).splitlines()[-len(WHERE) - 2 :]
    start = head.index("where")
    assert [line[start:].strip() for line in lines] == [words for _, words in WHERE]


def stream(resident, streamed, **more):
    return {"resident_layers": resident, "streamed_layers": streamed} | more


WHERE = (
    (dict(pin_memory=True), "host"),
    (dict(pin_memory=False), "host pageable"),
    (dict(pin_memory=True, kv_offload=True), "host, KV host"),
    (dict(cpu_offload=False, disk_offload=True, kv_offload=True), "disk, KV host"),
    (dict(cpu_offload=False), "device"),
    (dict(cpu_offload=False, device="cpu"), "host"),  # there is no other place
    (dict(engine="stream", stream=stream(40, 0)), "device"),
    (dict(engine="stream", stream=stream(30, 10)), "25% host"),
    # the embeddings of a dense model are on the device, too: of 5 bytes, the 3 that a step reads in host memory
    (
        dict(engine="stream", decode_weights_gbps=9.0, stream=stream(1, 3, fetched_bytes=1, computed_bytes=2)),
        "60% host",
    ),
    (dict(engine="stream", weight_bytes=100, stream=stream(0, 48, expert_slot_bytes=33)), "host, 33% cached"),
)


def test_options_that_differ_have_one_column_as_they_were_given(tmp_path, capsys):
    for words in (["--gpu-memory", "20", "--log-file", "a.log"], ["--gpu_memory=3.41592", "--cpu-compute", "off"], []):
        write_record(tmp_path / "a.jsonl", make_record(argv=["run_model.py", *words]))
    head, _, *rows = printed(capsys, tmp_path).splitlines()[-5:]
    options = [row[head.index("options") :] for row in rows]
    assert options == ["gpu-memory 20", "cpu-compute off, gpu-memory 3.42", "-"]
    rows = json.loads(printed(capsys, tmp_path, "--format", "json"))
    assert [row["gpu_memory"] for row in rows] == [20.0, 3.41592, None]


def test_a_failed_run_has_a_short_note_below_the_table(tmp_path, capsys):
    error = "out of memory: " + "tried to allocate 12 GiB, " * 100
    write_record(tmp_path / "a.jsonl", make_record())
    write_record(tmp_path / "a.jsonl", make_record(status="failed", error=error, decode_throughput=None, quant_bits=4))
    lines = printed(capsys, tmp_path).splitlines()
    assert max(map(len, lines)) <= 100 and len(lines) == 7
    assert (
        lines[-2].split()[:2] == ["2", "failed"]
        and lines[-1].startswith("#2 failed: out of memory: tried")
        and lines[-1].endswith("…")
    )


def test_a_narrow_terminal_hides_columns_and_says_which(tmp_path):
    records = [make_record(quant_bits=bits, prompt_len=length) for bits, length in ((4, 128), (16, 512))]
    for width in (40, 60, 80, 100, 200):
        lines = short_table([Run.read(record) for record in records], False, width).splitlines()
        assert max(map(len, lines)) <= width
        assert ("hidden for width" in " ".join(lines)) == (width < 80)
        assert any(line.startswith("token/s") and "bound" in above for above, line in zip(lines, lines[1:]))


def works(*works):
    """Records of (model, batch, prompt, generated, token/s)."""
    return [
        make_record(model=model, batch_size=batch, prompt_len=prompt, gen_len=gen, decode_throughput=speed)
        for model, batch, prompt, gen, speed in works
    ]


def below_the_rule(records, width, *sort):
    lines = short_table([Run.read(record) for record in records], False, width, *sort).splitlines()
    rule = next(index for index, line in enumerate(lines) if set(line) == {"-"})
    return lines[rule - 1], lines[rule + 1 :]


@pytest.mark.parametrize("width", [40, 80, 200])
def test_runs_of_equal_work_stand_below_a_heading_that_says_it_the_fastest_first(width):
    records = works(
        ("b", 8, 64, 9, 50.0), ("a", 8, 512, 9, 3.0), ("b", 8, 64, 9, 70.0), ("a", 1, 64, 9, 1.0), ("a", 8, 512, 9, 4.0),
        ("a", 1, 64, 9, 2.0),
    )  # fmt: skip
    _, lines = below_the_rule(records, width)
    assert [line.split()[0] if line.startswith(" ") else line for line in lines[:9]] == [
        *("a, batch 1, prompt 64", "2.00", "1.00"),
        *("a, batch 8, prompt 512", "4.00", "3.00"),
        *("b, batch 8, prompt 64", "70.0", "50.0"),
    ]
    assert "9 generated" in short_table([Run.read(record) for record in records], False, width).partition("token/s")[0]


@pytest.mark.parametrize("width", [40, 80, 200])
def test_where_most_runs_did_other_work_it_stands_in_columns_that_no_width_hides(width):
    head, lines = below_the_rule(works(("a", 1, 64, 9, 1.0), ("a", 8, 64, 9, 3.0), ("a", 8, 512, 33, 2.0)), width)
    place = head.split().index("batch")
    assert head.split()[place : place + 3] == ["batch", "prompt", "gen"]
    work = [line.split()[-3:] for line in lines[:3]]
    assert work == [["1", "64", "9"], ["8", "64", "9"], ["8", "512", "33"]]


@pytest.mark.parametrize(
    "name, header", [("total_throughput", "total"), ("load_s", "load"), ("quant_bits", "weights"), ("gpus", "GPUs")]
)
def test_the_column_that_was_sorted_by_is_shown_at_any_width(name, header):
    records = [make_record(load_s=2.5, batch_size=1), make_record(load_s=3.5, batch_size=2)]
    assert header in short_table([Run.read(record) for record in records], False, 50, name).partition("---")[0]


def test_predictions_fit_a_hundred_columns_and_say_what_a_figure_means(capsys, monkeypatch):
    for width in (80, 100, 200):
        monkeypatch.setenv("COLUMNS", str(width))
        lines = printed(capsys, RESULTS / "h200-beside", "--prediction").splitlines()
        assert max(map(len, lines)) <= width and lines[0].startswith("+10%: 10% more than the plan predicted")
        (deepspeed,) = [line.split() for line in lines if "deepspeed" in line]
        assert deepspeed[:6] == ["llama-2-13b", "deepspeed", "int4", "1", "+49.8%", "+51.3%"]
        (largest,) = [line.split() for line in lines if line.startswith("largest")]
        assert {"+49.8%", "+51.3%"} < set(largest)
        assert "as predicted in all runs: stored weights" in lines and "of 18 runs" in lines


def test_the_prediction_report_counts_the_times_within_their_ranges(tmp_path, capsys):
    said = {"prefill_s": 1.0, "prefill_range_s": [0.9, 1.1], "decode_s": 1.0, "decode_range_s": [0.9, 1.1]}
    odd = [None, "x", [1.0], [0.9, "x"], {"low": 1}, [None, None]]
    records = [make_record(predicted=said, prefill_latency_s=1.05, decode_latency_s=each) for each in (0.8, 0.95, 1.2)]
    records += [make_record(predicted=said | {"decode_range_s": each}, prefill_latency_s=1.2) for each in odd]
    (tmp_path / "runs.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in records))
    assert printed(capsys, tmp_path, "--prediction").splitlines()[-1] == (
        "within the predicted range: prefill 3 of 9, decode 1 of 3"
    )


def test_folders_below_and_several_folders_are_read_once_each(tmp_path, capsys):
    for folder, batch in (("one", 1), ("one/deep/er", 2), ("two", 3), ("one/.hidden", 4)):
        (tmp_path / folder).mkdir(parents=True)
        write_record(tmp_path / folder / "a.jsonl", make_record(batch_size=batch))
    (tmp_path / "one" / "deep" / "data.jsonl").write_text('{"prompt": "no run"}\n')
    (tmp_path / "one" / "deep" / "server.log").write_text("started\n")
    (tmp_path / "one" / "again").symlink_to(tmp_path / "two")
    rows = json.loads(
        printed(capsys, tmp_path / "one", tmp_path / "two", tmp_path / "one" / "deep", "--format", "json")
    )
    assert [row["batch_size"] for row in rows] == [1, 2, 3]
    assert [row["folder"] for row in rows] == [str(tmp_path / name) for name in ("one", "one/deep/er", "two")]
    table = printed(capsys, tmp_path / "one", tmp_path / "two")
    assert [line.split()[-1] for line in table.splitlines()[-3:]] == ["one", "one/deep/er", "two"]
    assert run_main(tmp_path / "one", tmp_path / "two") == 0 and capsys.readouterr().err == ""
    assert "folder" not in printed(capsys, tmp_path / "two")
