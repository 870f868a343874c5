"""What the page's figures draw, against values computed here from the records."""

import math
import warnings

import pytest
from test_html_report import (
    EVIL,
    FAILED,
    LINK_USE,
    committed_records,
    hostile_records,
    limit,
    many_records,
    odd_records,
    rich_record,
)

from zero_inference.records.hardware import HOST_COPY
from zero_inference.report.html import figures
from zero_inference.report.html.page import label_runs
from zero_inference.report.html.plot import MOST_ROWS
from zero_inference.report.run import Run
from zero_inference.utils.format import format_bytes

GIB = 2**30
H200 = {"gpus": [{"name": "H200"}], "cpu_model": "Xeon", "cpu_cores": 16}
MOVED = {"host_to_device_bytes_per_step": 14e9, "disk_read_bytes_per_step": 0, "cores_bytes_per_step": 0}


def drawn(draw, *records):
    return draw(label_runs([Run.read(record) for record in records]))


def only(draw, *records):
    (plot,) = drawn(draw, *records)
    return plot


def line(plot, name):
    """The points of the line with that id."""
    (found,) = [each for each in plot.figure.axes[0].lines if each.get_gid() == name]
    return [(float(x), float(y)) for x, y in found.get_xydata()]


def described(plot):
    return [text.partition(": ")[::2] for text in plot.description.split("; ")]


def bars(plot):
    """(left, width) of the bars, row by row."""
    return [(patch.get_x(), patch.get_width()) for patch in plot.figure.axes[0].patches]


def machine_record(link_gbps=55.0, **changes):
    return rich_record(transfers=MOVED, environment=H200, limit=limit(link_gbps=link_gbps)) | changes


def expected_bytes(record):
    """Bytes a token: what the link owes and the CPU reads; of the run on the device, what it reads there."""
    moved, found, steps = record["transfers"], record["limit"], record["gen_len"] - 1
    if found["bound_by"] == "device_memory":
        per_step = found["floor_step_s"]["device_memory"] * found["device_copy_gbps"] * 1e9
    else:
        to_device = moved["host_to_device_bytes_per_step"] - found["link_ahead_bytes"] / steps
        per_step = to_device + moved["cores_bytes_per_step"]
    return per_step / record["batch_size"]


def test_runs_are_below_the_roofline_at_their_bytes_and_throughput():
    records = committed_records("h200-beside")
    plot = only(figures.roofline, *records)
    assert plot.title == "Roofline: 1 x NVIDIA H200, Intel(R) Xeon(R) Processor with 16 cores"
    limits = [record["limit"] for record in records]
    rates = {
        "link": max(each["link_gbps"] for each in limits),
        "link_and_cores": max(each.get("link_beside_cores_gbps", 0) + each.get("cores_gbps", 0) for each in limits),
        "device_memory": max(each["device_copy_gbps"] for each in limits),
    }
    for bound, gb_per_s in rates.items():
        points = [
            (expected_bytes(record) / GIB, record["decode_throughput"])
            for record in records
            if record["limit"]["bound_by"] == bound
        ]
        assert sorted(line(plot, f"runs-{bound}")) == [pytest.approx(point) for point in sorted(points)]
        for gib, tokens_per_s in line(plot, f"line-{bound}"):
            assert gib * GIB * tokens_per_s == pytest.approx(gb_per_s * 1e9)
    assert plot.description.startswith(
        "link: 55.5 GB/s; link and cores: 67.5 to 159 GB/s; device memory: 4\u202f220 GB/s."
    )
    for record in records:
        share = f"{record['limit']['fraction_of_limit']:.1%} of its limit"
        assert f"{format_bytes(expected_bytes(record))} a token, {share}" in plot.description


def test_runs_that_read_the_disk_have_its_line():
    records = committed_records("h200")
    (record,) = [record for record in records if record["disk_offload"]]
    plot = only(figures.roofline, *records)
    nbytes = record["transfers"]["disk_read_bytes_per_step"] / record["batch_size"]
    assert line(plot, "runs-disk") == [pytest.approx((nbytes / GIB, record["decode_throughput"]))]
    gib, tokens_per_s = line(plot, "line-disk")[0]
    assert gib * GIB * tokens_per_s == pytest.approx(record["limit"]["disk_gbps"] * 1e9)


def test_each_machine_has_a_roofline():
    other = H200 | {"gpus": [{"name": "L4"}]}
    plots = drawn(figures.roofline, machine_record(), machine_record(44.0), machine_record(environment=other))
    assert [plot.title for plot in plots] == [
        "Roofline: 1 x H200, Xeon with 16 cores",
        "Roofline: 1 x L4, Xeon with 16 cores",
    ]
    assert plots[0].description.startswith("link: 44 to 55 GB/s."), "a link differs from minute to minute"
    many = [machine_record(environment=H200 | {"cpu_model": f"CPU {number}"}) for number in range(15)]
    assert len(drawn(figures.roofline, *many)) == figures.MOST_FIGURES


def test_without_a_gpu_there_is_no_link_to_draw():
    rates = {"link_kind": HOST_COPY, "device_copy_gbps": 40.0, "floor_step_s": {"device_memory": 0.1}}
    host = {"environment": {"cpu_model": "Xeon", "gpus": []}, "device": "cpu", "link_use": LINK_USE}
    records = [machine_record(limit=limit(bound, 0.5, **rates), **host) for bound in ("device_memory", "matmul")]
    plot = only(figures.roofline, *records)
    assert plot.title == "Roofline: no GPU, Xeon"
    assert not [each for each in plot.figure.axes[0].lines if each.get_gid() == "line-link"]
    # 0.1 s at 40 GB/s are 4 GB a step of 7 sequences
    assert "at 0.532 GiB a token, 50.0% of its limit by host memory" in plot.description
    assert "at 0.532 GiB a token, 50.0% of its limit by matrix products" in plot.description
    assert drawn(figures.link_use, *records) == []


@pytest.mark.parametrize(
    "changes",
    [
        {"transfers": None},
        {"limit": None},
        {"batch_size": 0},
        {"decode_throughput": 0},
        {"transfers": {"host_to_device_bytes_per_step": 0}},
        FAILED | {"error": "no room"},
    ],
    ids=lambda changes: " ".join(map(str, changes.items()))[:40],
)
def test_nothing_is_drawn_of_what_a_record_does_not_say(changes):
    assert drawn(figures.roofline, machine_record() | changes) == []
    assert drawn(figures.predictions, machine_record() | changes) == []


def test_measured_times_are_at_their_ratio_to_the_prediction():
    records = [record for record in committed_records("h200-beside") if record["predicted"]["decode_s"]]
    plot = only(figures.predictions, *committed_records("h200-beside"))
    ratios = {
        phase: [record[f"{phase}_latency_s"] / record["predicted"][f"{phase}_s"] for record in records]
        for phase in ("decode", "prefill")
    }
    for phase, expected in ratios.items():
        assert sorted(x for x, _ in line(plot, f"{phase}-ratio")) == pytest.approx(sorted(expected))
    order = [abs(math.log(x)) for x, _ in line(plot, "decode-ratio")]
    assert order == sorted(order, reverse=True)
    texts = {f"decode {decode:.2f}, prefill {prefill:.2f}" for decode, prefill in zip(*ratios.values())}
    assert {value for _, value in described(plot)} == texts
    near = sum(0.9 <= ratio <= 1.1 for ratio in ratios["decode"])
    assert f"{near} of {len(records)} decode times are within 10%" in plot.caption
    near = sum(0.85 <= ratio <= 1.15 for ratio in ratios["prefill"])
    assert f"{near} of {len(records)} prefill times are within 15%" in plot.caption


def test_predictions_far_off_are_at_the_edge_and_odd_ones_are_left_out():
    record = machine_record(decode_latency_s=9.0, predicted={"decode_s": 1.0, "prefill_s": None})
    plot = only(figures.predictions, record)
    assert line(plot, "decode-ratio")[0][0] == 4
    assert described(plot) == [("#1 deepspeed, host, fp16", "decode 9.00")] and "prefill" not in plot.caption[-60:]
    odd = (None, EVIL, 3, {}, {"decode_s": None}, {"decode_s": 0, "prefill_s": -1}, {"decode_s": EVIL})
    assert drawn(figures.predictions, *(machine_record(predicted=each) for each in odd)) == []


def test_one_batch_size_is_drawn_as_bars_with_the_limit_and_several_as_lines():
    plot = only(
        figures.throughput, *(rich_record(step_s=step, quant_bits=bits) for step, bits in ((0.3, 16), (0.1, 4)))
    )
    assert plot.title == "Throughput at batch 7: facebook/opt-66b, prompt 129, 33 generated"
    assert [name for name, _ in described(plot)] == ["deepspeed, host, int4", "deepspeed, host, fp16"]
    speeds = [width for _, width in bars(plot)]
    assert speeds == pytest.approx([70, 23.3], rel=0.05)
    (limits,) = plot.figure.axes[0].collections
    assert [path.vertices[0][0] for path in limits.get_paths()] == pytest.approx([speed / 0.93 for speed in speeds])

    records = [rich_record(batch_size=batch) for batch in (4, 1, 1)]
    plot = only(figures.throughput, *records)
    assert plot.title.startswith("Throughput against batch size")
    (setting,) = plot.figure.axes[0].lines
    first, second, third = (record["decode_throughput"] for record in records)
    assert setting.get_xydata().tolist() == [[1, (second + third) / 2], [4, first]]


def test_models_with_a_single_run_share_one_figure():
    plot = only(figures.throughput, *(rich_record(model=f"org/model-{size}b", batch_size=size) for size in (7, 13, 70)))
    assert plot.title == "Throughput: models and lengths with one run"
    assert all(f"batch {size}, org/model-{size}b, prompt 129, 33 generated" in plot.description for size in (7, 13, 70))


def test_runs_of_different_lengths_are_not_joined_in_a_line_or_a_median():
    lengths = ((128, 32), (128, 8), (512, 32))
    records = [
        rich_record(prompt_len=prompt, gen_len=gen, batch_size=batch, limit=limit(share=0.1 * batch))
        for prompt, gen in lengths
        for batch in (1, 3)
    ]
    names = {f"prompt {prompt}, {gen} generated" for prompt, gen in lengths}
    assert {plot.title.partition(", ")[2] for plot in drawn(figures.throughput, *records)} == names
    shares = described(only(figures.shares_of_limit, *records))
    assert [value for _, value in shares] == ["20.0% (2 runs)"] * 3
    assert {name.partition("opt-66b, ")[2] for name, _ in shares} == names


def test_runs_with_other_options_are_settings_of_their_own():
    def run(*options, **changes):
        return rich_record(engine="stream", argv=["run_model.py", *options], **changes)

    records = [run("--gpu-memory", "20"), run("--gpu_memory=3.5", step_s=0.4), run("--seed", "3", step_s=0.5)]
    plot = only(figures.throughput, *records, run("--seed", "4", step_s=0.5))
    names, texts = zip(*described(plot))
    assert names == ("stream, host, fp16, gpu-memory 20", "stream, host, fp16, gpu-memory 3.5", "stream, host, fp16")
    assert "2 runs" in texts[2]


def test_shares_of_the_limit_are_sorted():
    plot = only(figures.shares_of_limit, *committed_records("h200"))
    shares = [float(value.partition("%")[0]) for _, value in described(plot)]
    assert {97.9, 95.8, 17.2, 16.8} <= set(shares) and shares == sorted(shares, reverse=True)


def test_phases_link_time_and_steps_are_drawn_for_the_runs_that_have_them():
    observed = rich_record(step_s=0.2, engine="stream", link_use=LINK_USE)
    records = [observed, rich_record(link_use=None), rich_record() | FAILED]
    plot = only(figures.phases, *records)
    prefill_s, decode_s = observed["prefill_latency_s"], observed["decode_latency_s"]
    assert bars(plot)[::2] == [pytest.approx((0, 100 * prefill_s / (prefill_s + decode_s))), *bars(plot)[2::2]]
    assert len(bars(plot)) == 4 and described(plot)[0][1].startswith("333 ms + ")
    plot = only(figures.link_use, *records)
    assert [width for _, width in bars(plot)] == pytest.approx([60, 30, 3, 7])
    assert described(plot) == [("#1 stream, host, fp16", "54.1 GB/s")]
    assert len(described(only(figures.steps, *records))) == 2


def test_scores_are_drawn_with_their_standard_errors():
    scores = {"humaneval": {"pass_at_k": {"1": 0.12, "10": 0.31}, "stderr": {"1": 0.0254, "10": None}, "n": 10}}
    plots = drawn(figures.quality, rich_record(quality=scores), *odd_records()[:2])
    assert {"Quality: mmlu accuracy", "Quality: perplexity", "Quality: humaneval pass@1"} < {
        plot.title for plot in plots
    }
    texts = {plot.title: [value for _, value in described(plot)] for plot in plots}
    assert texts["Quality: humaneval pass@1"] == ["12.0 ± 2.5 %", "12.0 %"]
    assert texts["Quality: humaneval pass@10"] == ["31.0 %", "31.0 %"]


def test_a_figure_has_the_first_runs_and_a_title_that_says_so():
    plot = only(figures.steps, *many_records(40))
    assert plot.title == f"Step times (first {MOST_ROWS} of 40 runs)" and len(described(plot)) == MOST_ROWS
    plot = only(figures.roofline, *(machine_record() for _ in range(figures.MOST_POINTS + 1)))
    assert f"The first {figures.MOST_POINTS} of {figures.MOST_POINTS + 1} runs." in plot.caption


@pytest.mark.parametrize("records", [odd_records, hostile_records])
def test_odd_and_hostile_records_are_drawn_without_errors_and_warnings(records):
    runs = label_runs([Run.read(record) for record in records()])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = figures.all_figures(runs)
    assert len(found) > 3
    assert all("<script" not in svg and "<img" not in svg for _, svg in found)


def test_a_setting_has_the_same_look_in_all_figures_and_few_lines_are_named():
    records = [
        rich_record(model=model, engine=engine, batch_size=batch)
        for model in ("org/a", "org/b")
        for engine in [f"engine {number}" for number in range(9 if model == "org/a" else 2)]
        for batch in (1, 8)
    ]
    first, second = (plot.figure.axes[0].lines for plot in drawn(figures.throughput, *records))
    looks = {each.get_label(): (each.get_color(), each.get_marker()) for each in first}
    assert len(looks) == 7 and len(set(looks.values())) == 7 and "other settings (see the table)" in looks
    assert {each.get_label(): (each.get_color(), each.get_marker()) for each in second}.items() <= looks.items()
