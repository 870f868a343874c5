"""The report reads what runs wrote, records and logs of older tools, and prints them in four formats."""

import csv
import io
import json
from pathlib import Path

import pytest
from conftest import write_record

from zero_inference.cli import console_main
from zero_inference.report.columns import COLUMNS
from zero_inference.report.run import Run, parse_log_name
from zero_inference.utils import GB, get_filename, write_benchmark_log

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
        "peak_gpu_bytes": 12 * GB, "peak_host_bytes": None, "output_ids_sha256": "ab", "pin_memory": True,
        "transfers": None, "limit": {"link_gbps": 55.4, "floor_decode_s": 1.5, "fraction_of_limit": 0.7512},
        "ds_config": None, "environment": {"gpus": [{"name": "H"}, {"name": "H"}], "git_commit": "0" * 40},
    }  # fmt: skip
    return record | changes


def write_log(path, record):
    sizes = [record[key] for key in ("model_bytes", "cache_bytes", "hidden_bytes", "peak_gpu_bytes")]
    phases = [
        record[f"{phase}_{what}"] for phase in ("prefill", "decode", "total") for what in ("latency_s", "throughput")
    ]
    write_benchmark_log(path, *sizes, *phases)


@pytest.fixture
def report(tmp_path, capsys, monkeypatch):
    """report(*records, words=[...], width=100) -> what `zero-inference report FOLDER` prints of them, parsed if it is JSON."""

    def run(*records, words=(), folder=tmp_path / "runs", width=100):
        monkeypatch.setenv("COLUMNS", str(width))
        folder.mkdir(exist_ok=True)
        for record in records:
            write_record(folder / "a.jsonl", record)
        assert console_main(["zero-inference", "report", str(folder), *map(str, words)]) == 0
        out = capsys.readouterr().out
        return json.loads(out) if "json" in words else out

    return run


def test_a_log_counts_only_where_there_is_no_record_of_its_name(tmp_path, report):
    record = make_record()
    for name in ("Qwen2.5-x", get_filename("opt-66b", 7, 129, 33, False, True, 1, 2, False, True), "my own name"):
        write_log(tmp_path / f"{name}.log", record)
    write_record(tmp_path / "Qwen2.5-x.jsonl", record)
    recorded, old, own = report(words=["--format", "json", "--all-columns"], folder=tmp_path)
    assert recorded["total_throughput"] == 9.1234567 and recorded["file"] == "Qwen2.5-x.jsonl"
    assert (old["total_throughput"], old["peak_gpu_bytes"], own["model"]) == (9.123, 12 * GB, "my own name")


@pytest.mark.parametrize(
    "cpu, disk, kv, quantized", [(True, False, False, True), (False, True, True, False), (0, 0, 0, 0)]
)
def test_log_names_are_parsed_back(cpu, disk, kv, quantized):
    name = get_filename("org/my-bs3-model-7b", 24, 513, 31, cpu, disk, 2, 3, kv, quantized, prefix="stream")
    assert parse_log_name(name) == {
        "model": "my-bs3-model-7b", "engine": "stream", "num_nodes": 2, "world_size": 6, "batch_size": 24,
        "prompt_len": 513, "gen_len": 31, "quant_bits": None if quantized else 16,
        "weight_quantize": True if quantized else None, "cpu_offload": cpu, "disk_offload": disk, "kv_offload": kv,
    }  # fmt: skip


def test_folders_below_and_several_folders_are_read_once_each(tmp_path, report):
    for folder, batch in (("one", 1), ("one/deep/er", 2), ("two", 3), ("one/.hidden", 4)):
        (tmp_path / folder).mkdir(parents=True)
        write_record(tmp_path / folder / "a.jsonl", make_record(batch_size=batch))
    (tmp_path / "one" / "deep" / "data.jsonl").write_text('{"prompt": "no run"}\n')
    (tmp_path / "one" / "deep" / "server.log").write_text("started\n")
    (tmp_path / "one" / "again").symlink_to(tmp_path / "two")
    words = [tmp_path / "two", tmp_path / "one" / "deep", "--format", "json"]
    rows = report(words=words, folder=tmp_path / "one")
    assert [row["batch_size"] for row in rows] == [1, 2, 3]
    assert [row["folder"] for row in rows] == [str(tmp_path / name) for name in ("one", "one/deep/er", "two")]


def test_only_columns_that_tell_runs_apart_are_kept(report):
    always = {"model", "engine", "decode_throughput", "fraction_of_limit", "bound_by", "prefill_latency_s"}
    always |= {"total_throughput", "decode_weights_gbps", "peak_gpu_bytes"}
    one, other = make_record(), make_record(quant_bits=4, timestamp="later", load_s=2.0)
    assert report(one, words=["--format", "json"])[0].keys() == always
    assert report(other, words=["--format", "json"])[0].keys() == {*always, "quant_bits", "weights"}
    failed = make_record(status="failed", error="no room", quant_bits=8, dtype=None)  # dtype: unknown, so no difference
    rows = report(failed, words=["--format", "json"])
    assert rows[0].keys() == {*always, "quant_bits", "weights", "error", "status"}
    assert report(words=["--format", "json", "--all-columns"])[0].keys() == {column.name for column in COLUMNS}


def test_csv_and_json_keep_every_digit_in_si_units(report):
    records = [make_record(), make_record(status="failed", error="x", limit=None, decode_throughput=None)]
    text = report(*records, words=["--format", "csv", "--all-columns"])
    first, second = csv.DictReader(io.StringIO(text))
    assert float(first["prefill_latency_s"]) == 1 / 3 and first["model_bytes"] == "131399321792"
    assert first["cache_bytes"] == str(2**60 + 1) and second["fraction_of_limit"] == ""
    first, second = report(words=["--format", "json", "--all-columns"])
    assert first["decode_throughput"] == 10 / 3 and first["cache_bytes"] == 2**60 + 1
    assert first["cpu_offload"] is True and second["decode_throughput"] is None and first["peak_host_bytes"] is None


def test_a_table_has_the_shared_settings_above_and_the_fastest_run_first(report):
    slow, fast = make_record(decode_throughput=15.4321), make_record(quant_bits=4, decode_throughput=61.2)
    failed = make_record(status="failed", error="asked 12 GiB,\n found [red] " + "x" * 300, decode_throughput=None)
    out = report(slow, fast, failed, width=200)
    assert out.startswith(
        "model facebook/opt-66b, engine deepspeed, weights in host, batch 7, prompt 129, gen 33, GPUs 2 x H\n"
    )
    first, second, third, note = out.splitlines()[4:8]
    assert first.split() == ["1", "int4", "61.2", "75.1", "link", "0.333", "9.12", "12.0", "ok"]
    assert second.split()[:3] == ["2", "fp16", "15.4"] and third.split()[-1] == "failed"
    assert note.startswith("#3 failed: asked 12 GiB, found [red]")


@pytest.mark.parametrize("width", [40, 80, 200])
def test_a_narrow_terminal_hides_columns_and_says_which(report, width):
    records = [make_record(quant_bits=bits, prompt_len=length) for bits, length in ((4, 128), (16, 512))]
    lines = report(*records, width=width).splitlines()
    assert max(map(len, lines)) <= width
    assert ("hidden for width" in " ".join(lines)) == (width < 80)


@pytest.mark.parametrize("words", [[], ["--prediction"]])
def test_tables_of_all_committed_runs_fit(report, words):
    lines = report(folder=RESULTS, words=words).splitlines()
    assert max(map(len, lines)) <= 100 and any("decode" in line for line in lines[:5])


def test_throughput_sorts_best_first_and_latency_ascending(report, capsys):
    records = [
        make_record(total_throughput=2.0, prefill_latency_s=2.0, batch_size=1),
        make_record(status="failed", error="x", total_throughput=None, prefill_latency_s=None, batch_size=2),
        make_record(total_throughput=3.0, prefill_latency_s=3.0, batch_size=3),
    ]
    rows = report(*records, words=["--format", "json", "--sort", "total-throughput"])
    assert [row["batch_size"] for row in rows] == [3, 1, 2]
    rows = report(words=["--format", "json", "--sort", "prefill_latency_s"])
    assert [row["batch_size"] for row in rows] == [1, 3, 2] and "load" in report(words=["--sort", "load_s"], width=50)
    names = report(make_record(), make_record(model="other/opt-1b"), words=["--sort", "model"])
    assert "opt-1b" in names and "other/" not in names
    with pytest.raises(SystemExit):
        console_main(["zero-inference", "report", ".", "--sort", "total-througput"])
    assert capsys.readouterr().err == "error: --sort total_througput: did you mean total_throughput?\n"


@pytest.mark.parametrize(
    "words, code, message",
    [
        (["{}"], 2, "no run in the .log and .jsonl files of {}; python run_model.py ... makes one"),
        (["{}/gone"], 2, "does not exist"),
        (["{}/a.log"], 2, "is a file, not a folder"),
        ([], 2, "the following arguments are required: DIR"),
        (["--fields", "."], 2, "--fields takes no folder and no other option"),
        (["--fields", "--sort", "engine"], 2, "--fields takes no folder"),
        (["{}", "--prediction", "--sort", "engine"], 2, "drop --sort"),
        (["{}", "--html", "{}/a.log"], 2, "end it in .html"),
        (["{}", "--html", "{}/gone/page.html"], 2, "page.html cannot be written"),
        (["{}", "--html", "{}/page.html"], 0, "warning: no run in"),
    ],
)
def test_what_cannot_be_reported_is_said(tmp_path, capsys, words, code, message):
    (tmp_path / "a.log").write_text("")
    assert console_main(["zero-inference", "report", *(word.format(tmp_path) for word in words)]) == code
    assert message.format(tmp_path) in capsys.readouterr().err


def test_scores_stand_in_the_row_of_their_run_with_their_errors(report):
    quality = {
        "mmlu": {"accuracy": 0.3125, "stderr": 0.058},
        "hellaswag": {"accuracy": 0.5, "stderr": 0.25, "acc_norm": 0.75, "acc_norm_stderr": 0.125},
        "humaneval": {"pass_at_k": {"1": 0.2}, "stderr": {"1": 0.03}},
        "perplexity": {"perplexity": 12.5, "stderr": None},
    }
    row, other = report(make_record(quality=quality), make_record(quant_bits=4), words=["--format", "json"])
    assert (row["mmlu_accuracy"], row["mmlu_stderr"], row["humaneval_stderr"]) == (0.3125, 0.058, 0.03)
    assert (row["hellaswag_accuracy"], row["hellaswag_acc_norm"], row["humaneval_pass_at_1"]) == (0.5, 0.75, 0.2)
    assert row["perplexity"] == 12.5 and "perplexity_stderr" not in row and other["mmlu_accuracy"] is None


def stream(resident, streamed, **more):
    return {"resident_layers": resident, "streamed_layers": streamed} | more


@pytest.mark.parametrize(
    "changes, words",
    [
        ({}, "host"),
        (dict(pin_memory=False), "host pageable"),
        (dict(kv_offload=True), "host, KV host"),
        (dict(cpu_offload=False, disk_offload=True, kv_offload=True), "disk, KV host"),
        (dict(cpu_offload=False), "device"),
        (dict(cpu_offload=False, device="cpu"), "host"),  # there is no other place
        (dict(engine="stream", stream=stream(40, 0)), "device"),
        (dict(engine="stream", stream=stream(30, 10)), "25% host"),
        (dict(engine="stream", weight_bytes=100, stream=stream(0, 48, expert_slot_bytes=33)), "host, 33% cached"),
        (dict(cpu_offload=None, disk_offload=None), None),
    ],
)
def test_where_joins_offload_page_locking_and_the_cache(changes, words):
    assert Run.read(make_record(**changes)).where == words


def test_options_that_differ_have_one_column_as_they_were_given(report, tmp_path):
    words = (["--gpu-memory", "20", "--log-file", "a.log"], ["--gpu_memory=3.41592", "--cpu-compute", "off"], [])
    records = [make_record(argv=["run_model.py", *each]) for each in words]
    rows = report(*records, words=["--format", "json"])
    assert [row["options"] for row in rows] == ["gpu-memory 20", "gpu-memory 3.42, cpu-compute off", None]
    assert [row["gpu_memory"] for row in rows] == [20.0, 3.41592, None]
    records = [make_record(options={"gpu-memory": 0.0}), make_record(options={})]
    rows = report(*records, words=["--format", "json"], folder=tmp_path / "zero")
    assert [row["options"] for row in rows] == ["gpu-memory 0", None]


def test_predictions_beside_what_was_measured(report):
    def record(peak, moved, **predicted):
        return make_record(
            peak_gpu_bytes=peak, transfers={"host_to_device_bytes_per_step": moved}, predicted=predicted or None
        )

    said = dict(peak_gpu_bytes=100, host_to_device_bytes_per_step=50, disk_read_bytes_per_step=0, decode_s=1.6)
    runs = [record(110, 50.0, **said), record(95, None, **said), record(100, 40.0, **said), record(100, 40.0)]
    rows = report(*runs, words=["--prediction", "--format", "json"])
    assert [row["peak_gpu_bytes"] for row in rows] == pytest.approx([0.1, -0.05, 0.0])
    assert [row["host_to_device_bytes_per_step"] for row in rows] == [0.0, None, pytest.approx(-0.2)]
    assert len(rows) == 3 and "disk_read_bytes_per_step" not in rows[0] and rows[0]["decode_s"] == pytest.approx(0.25)
    ratios = [row["decode_over_predicted"] for row in report(words=["--format", "json"])]
    assert ratios == [1.25, 1.25, 1.25, None]
    summary = [line for line in report(words=["--prediction", "--format", "md"]).splitlines() if "percentile" in line]
    assert len(summary) == 2 and "+8.0%" in summary[1]


def test_the_prediction_report_counts_the_times_within_their_ranges(report):
    said = {"prefill_s": 1.0, "prefill_range_s": [0.9, 1.1], "decode_s": 1.0, "decode_range_s": [0.9, 1.1]}
    odd = [None, "x", [1.0], [0.9, "x"], {"low": 1}, [None, None]]
    records = [make_record(predicted=said, prefill_latency_s=1.05, decode_latency_s=each) for each in (0.8, 0.95, 1.2)]
    records += [make_record(predicted=said | {"decode_range_s": each}, prefill_latency_s=1.2) for each in odd]
    last = report(*records, words=["--prediction"]).splitlines()[-1]
    assert last == "within the predicted range: prefill 3 of 9, decode 1 of 3"
