"""The page of the report: what it says, what its figures draw, that records cannot break it, and how Chromium shows it."""

import base64
import html
import json
import random
import re
import shutil
import subprocess
import time
import warnings
from pathlib import Path

import pytest
from test_report import make_record, write_log

from zero_inference.cli import console_main
from zero_inference.records.hardware import HOST_COPY
from zero_inference.report import page as report_page
from zero_inference.report.run import Run, label_runs
from zero_inference.utils.format import three_digits

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
EVIL = "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
UNMEASURED = ("loops", "limit", "prefill_latency_s", "decode_throughput", "total_throughput")
FAILED = {"status": "failed"} | dict.fromkeys(UNMEASURED)
H200 = {"gpus": [{"name": "H200"}], "cpu_model": "Xeon", "cpu_cores": 16}
MOVED = {"host_to_device_bytes_per_step": 14e9, "disk_read_bytes_per_step": 0, "cores_bytes_per_step": 0}
GIB = 2**30


def limit(bound_by="link", share=0.93, **more):
    rates = {"link_gbps": 55.4, "device_copy_gbps": 3900.0, "floor_decode_s": 1.0}
    return {**rates, "bound_by": bound_by, "fraction_of_limit": share, **more}


def rich_record(step_s=0.3, spread=0.02, loops=1, **changes):
    """A record with loops and steps, as `make_record` has none."""
    draw = random.Random(str(changes))
    steps = [step_s * draw.lognormvariate(0, 0.02) for _ in range(31)]
    times = [[each * (1 + spread * index) for each in steps] for index in range(loops)]
    decode_s = sum(steps)
    return make_record(
        loops=[{"prefill_s": 0.2, "decode_s": sum(s), "total_s": 0.2 + sum(s), "step_s": s} for s in times],
        decode_latency_s=decode_s,
        decode_throughput=changes.get("batch_size", 7) * 31 / decode_s,
        **{"limit": limit(), **changes},
    )


def many_records(count):
    return [
        rich_record(
            step_s=0.01 * (1 + number % 37),
            model=f"organisation/a-model-with-quite-a-long-name-{number // 4 % 9}b-instruct",
            engine=("deepspeed", "stream", "accelerate", "resident")[number % 4],
            batch_size=2 ** (number // 36 % 7),
            predicted={"decode_s": 0.3 * (1 + number % 37), "prefill_s": 1 / (2.5 + number % 2)},
        )
        for number in range(count)
    ]


SCORES = {
    "mmlu": {"accuracy": 0.42, "stderr": 0.0123},
    "hellaswag": {"accuracy": 0.51, "acc_norm": 0.55, "acc_norm_stderr": 0.021},
    "humaneval": {"pass_at_k": {"1": 0.12, "10": 0.31}, "stderr": {"1": 0.0254, "10": None}, "n": 10},
    "perplexity": {"perplexity": 12.34},
}


def odd_records():
    """What no run writes: bytes, rates and predictions that are far off, of another kind, or markup."""
    gpu = {"gpus": [{"name": EVIL}, {"name": 3}, 4], "cpu_model": EVIL, "cpu_cores": "x"}
    moved = [None, 3, "x", *({"host_to_device_bytes_per_step": value} for value in (EVIL, 1e19, 1e-14, -5, 26e9))]
    limits = (
        limit(share=1e19), limit(share=0), limit(EVIL, 1e-14), limit("disk", 0.5, disk_gbps=1e-14), limit("matmul", 0.3, floor_step_s=[1]),
        limit("link_and_cores", 0.5, cores_gbps=EVIL, link_beside_cores_gbps=0), limit(link_kind=EVIL, link_ahead_bytes=1e19),
        limit("device_memory", 0.3, floor_step_s={"device_memory": EVIL}),
    )  # fmt: skip
    predicted = ({"decode_s": 1e-15, "prefill_s": 1e20}, {"decode_s": EVIL, "prefill_s": 0}, EVIL, None)
    return [
        rich_record(quality=SCORES),
        rich_record(step_s=0.4, quant_bits=4, quality={"mmlu": {"accuracy": 0.397, "stderr": 0.012}}),
        rich_record(model=EVIL, engine=EVIL, limit=limit(EVIL, 0.3), environment=gpu, quality={EVIL: 0.5}),
        make_record(**FAILED, model="日本語の名前" * 12, engine="$x_1$ \u202eabc \x00", error=EVIL + "\n" + "W" * 3000),
        {"status": "ok", "model": "old", "engine": "deepspeed", "batch_size": 4, "decode_throughput": 31.5}, {"status": "ok"},
        {"status": "ok", "model": 5, "engine": ["x"], "limit": "odd", "loops": "odd", "quality": [1], "link_use": 3,
         "batch_size": "many", "environment": "none", "decode_throughput": -3, "prefill_latency_s": "1e999"},
        rich_record() | {"loops": [{"step_s": [0.1] * 200 + [0.9, 5.0, None, "x"]}, 3]},
        *(
            rich_record(transfers=each, limit=bounds, environment=gpu if index % 2 else EVIL, world_size=index % 3,
                        predicted=predicted[(index + at) % 4])
            for index, each in enumerate(moved) for at, bounds in enumerate(limits)
        ),
    ]  # fmt: skip


def committed_records(folder):
    return [json.loads(line) for file in sorted((RESULTS / folder).glob("*.jsonl")) for line in file.open()]


class Page:
    """What a browser would read: tags, attributes, texts and table rows."""

    def __init__(self, file):
        self.file, self.source = file, file.read_text(encoding="utf-8")
        inside = re.findall(r"<[a-z][^>]*>", self.source)
        self.tags = [re.match(r"<([a-z]+)", tag)[1] for tag in inside]
        self.attributes = [each for tag in inside for each in re.findall(r'([\w:-]+)="([^"]*)"', tag)]
        self.rows = [[plain(cell) for cell in elements("t[hd]", row)] for row in elements("tr", self.source)]
        self.words = plain(re.sub(r"<(script|style)>.*?</\1>", "", self.source, flags=re.S))

    def texts(self, tag):
        return [plain(text) for text in elements(tag, self.source)]

    def column(self, header):
        return [row[self.rows[0].index(header)] for row in self.rows[1:]]


def elements(tag, source):
    return re.findall(rf"<{tag}[ >].*?</{tag}>", source, re.S)


def plain(source):
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", source)).split())


def page_of(folder, records, *options):
    """The page of `records`, which are put into `folder` first, and what is on it."""
    folder.mkdir(exist_ok=True)
    (folder / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    assert console_main(["zero-inference", "report", str(folder), "--html", str(folder / "page.html"), *options]) == 0
    return Page(folder / "page.html")


@pytest.fixture(scope="module")
def committed(tmp_path_factory):
    """The page of the first committed runs on one H200."""
    return page_of(tmp_path_factory.mktemp("committed"), committed_records("h200"))


def test_the_page_has_every_run_and_the_figures_that_their_records_have_data_for(committed):
    rates = {record["decode_throughput"] for record in committed_records("h200")}
    assert set(committed.column("decode (token/s)")) == set(map(three_digits, rates))
    assert f"{max(rates):.0f} token/s in decode" in committed.words
    titles = " ".join(committed.texts("h3"))
    for subject in ("Throughput at batch 8: opt-13b", "Share of the machine's limit", "Roofline: 1 x NVIDIA H200"):
        assert subject in titles
    assert "Quality" not in titles and len(committed.source) < 400_000


def test_the_page_fetches_nothing_and_its_ids_are_unique(committed):
    assert not {"link", "img", "iframe", "object", "image"} & set(committed.tags)
    targets = [value for name, value in committed.attributes if name in ("src", "href", "xlink:href", "action", "data")]
    assert targets and all(value.startswith("#") for value in targets)
    assert "@import" not in committed.source and not re.search(r"url\((?!#)", committed.source)
    ids = [value for name, value in committed.attributes if name == "id"]
    assert len(ids) == len(set(ids)) and {value[1:] for value in targets} <= set(ids)
    assert committed.tags.count("svg") == committed.tags.count("figure") > 3
    assert not re.search(r"#000\d{3}", committed.source), "colours are the theme's variables"


def test_text_of_records_stays_text(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        page = page_of(tmp_path, odd_records())
    assert page.tags.count("script") == 1 and "img" not in page.tags
    assert not any(name.startswith("on") for name, _ in page.attributes)
    assert EVIL in " ".join(page.texts("td")) and "$x_1$" in page.words
    assert not re.search("[\x00\u202e\ud800]", page.source)


def test_what_the_loops_cannot_tell_apart_is_not_called_fastest(tmp_path):
    def headline(name, **changes):
        return page_of(tmp_path / name, [rich_record(**changes), rich_record(0.305, engine="stream", **changes)]).words

    assert "not distinguishable by the spread of their loops: stream, host, fp16, batch 7" in headline("wide", loops=3)
    assert " times the next (stream, host, fp16, batch 7: " in headline("quiet", loops=3, spread=1e-5)
    assert " times the next (stream" in headline("single"), "the spread of one loop is unknown"


def test_failed_runs_are_listed_with_their_error_and_are_never_the_fastest(tmp_path):
    failed = rich_record(status="failed", error="out of memory: asked 12 GiB", step_s=0.001, quant_bits=4)
    page = page_of(tmp_path, [failed, rich_record()])
    assert "out of memory: asked 12 GiB" in page.texts("pre") and "2 runs of 1 models, 1 failed" in page.words
    assert page.texts("strong") == ["deepspeed, host, fp16, batch 7"] and page.column("status") == ["ok", "failed"]
    only = page_of(tmp_path / "only", [make_record(**FAILED, error="no room")])
    assert "no room" in only.words and "svg" not in only.tags


def test_logs_without_records_and_an_empty_folder_have_a_page(tmp_path):
    write_log(tmp_path / "ds-opt-66b-bs7-prompt129-gen33-n1x1-cpu.log", make_record())
    assert len(page_of(tmp_path, []).rows) == 2
    assert "No runs yet" in page_of(tmp_path / "empty", []).texts("h2")


def test_the_pages_order_is_that_of_sort_and_its_columns_those_of_all_columns(tmp_path):
    records = [rich_record(step_s=step, batch_size=batch) for step, batch in ((0.3, 2), (0.1, 1), (0.2, 2), (0.15, 4))]
    page = page_of(tmp_path, records)
    speeds = [float(text) for text in page.column("decode (token/s)")]
    assert page.column("batch") == ["1", "2", "2", "4"] and speeds[1] > speeds[2]
    page = page_of(tmp_path, records, "--sort", "decode_throughput", "--all-columns")
    speeds = [float(text) for text in page.column("decode (token/s)")]
    assert speeds == sorted(speeds, reverse=True) and "ids sha256" in page.rows[0]


def test_the_page_of_many_runs_is_small_and_made_in_seconds(tmp_path):
    start = time.process_time()
    page = page_of(tmp_path, many_records(40) * 40)
    assert len(page.rows) == 1601 and len(page.source) < 3_000_000
    assert f"(first {report_page.MAX_ROWS} of 1600)" in page.words
    assert time.process_time() - start < 60


# The figures.


def drawn(draw, *records):
    return list(draw(label_runs([Run.read(record) for record in records])))


def only(draw, *records):
    (plot,) = drawn(draw, *records)
    return plot


def line(plot, name):
    """The points of the line with that id."""
    (found,) = [each for each in plot.figure.axes[0].lines if each.get_gid() == name]
    return [(float(x), float(y)) for x, y in found.get_xydata()]


def widths(plot):
    return [patch.get_width() for patch in plot.figure.axes[0].patches]


def texts(plot):
    return [text.get_text().replace("\n", " ") for text in plot.figure.axes[0].texts]


def needed_bytes(record):
    """Bytes a token: what the link owes and the CPU reads; of the run on the device, what it reads there."""
    moved, found = record["transfers"], record["limit"]
    if found["bound_by"] == "device_memory":
        return found["floor_step_s"]["device_memory"] * found["device_copy_gbps"] * 1e9 / record["batch_size"]
    to_device = moved["host_to_device_bytes_per_step"] - found["link_ahead_bytes"] / (record["gen_len"] - 1)
    return (to_device + moved["cores_bytes_per_step"]) / record["batch_size"]


def test_runs_are_below_the_roofline_at_their_bytes_and_throughput():
    records = committed_records("h200-beside")
    plot = only(report_page.rooflines, *records)
    for bound in ("link", "link_and_cores", "device_memory"):
        of_bound = [record for record in records if record["limit"]["bound_by"] == bound]
        points = [(needed_bytes(record) / GIB, record["decode_throughput"]) for record in of_bound]
        assert sorted(line(plot, f"runs-{bound}")) == [pytest.approx(point) for point in sorted(points)]
    link_gbps = max(record["limit"]["link_gbps"] for record in records)
    for gib, tokens_per_s in line(plot, "line-link"):
        assert gib * GIB * tokens_per_s == pytest.approx(link_gbps * 1e9)


def test_each_machine_has_a_roofline_and_a_cpu_no_link():
    records = [
        rich_record(transfers=MOVED, environment=each) for each in (H200, H200, H200 | {"gpus": [{"name": "L4"}]})
    ]
    titles = [plot.title for plot in drawn(report_page.rooflines, *records)]
    assert titles == ["Roofline: 1 x H200, Xeon", "Roofline: 1 x L4, Xeon"]
    rates = dict(link_kind=HOST_COPY, device_copy_gbps=40.0, floor_step_s={"device_memory": 0.1})
    on_cpu = rich_record(limit=limit("device_memory", 0.5, **rates), environment={"cpu_model": "Xeon"}, device="cpu")
    plot = only(report_page.rooflines, on_cpu)  # 0.1 s at 40 GB/s are 4 GB a step of 7 sequences
    assert line(plot, "runs-host_memory")[0][0] == pytest.approx(4e9 / 7 / GIB)


def test_measured_times_are_at_their_ratio_to_the_prediction_the_farthest_first():
    records = [record for record in committed_records("h200-beside") if record["predicted"]["decode_s"]]
    decode, prefill = drawn(report_page.predictions, *committed_records("h200-beside"))
    for phase, plot in (("decode", decode), ("prefill", prefill)):
        ratios = [record[f"{phase}_latency_s"] / record["predicted"][f"{phase}_s"] for record in records]
        assert sorted(widths(plot)) == pytest.approx(sorted(ratios))
        close = sum(0.9 <= ratio <= 1.1 for ratio in ratios)
        assert f"{close} of {len(records)} are within 10%" in plot.caption
    assert widths(decode)[0] == max(widths(decode))


def test_one_batch_size_is_drawn_as_bars_with_the_limit_and_several_as_lines():
    records = [rich_record(step_s=step, quant_bits=bits) for step, bits in ((0.3, 16), (0.1, 4))]
    plot = only(report_page.throughput, *records)
    assert plot.title == "Throughput at batch 7: opt-66b, prompt 129, 33 generated"
    assert texts(plot)[::2] == ["deepspeed, host, int4", "deepspeed, host, fp16"]
    assert widths(plot) == pytest.approx([70, 23.3], rel=0.05)
    (limits,) = plot.figure.axes[0].collections
    assert [path.vertices[0][0] for path in limits.get_paths()] == pytest.approx([each / 0.93 for each in widths(plot)])
    records = [rich_record(batch_size=batch) for batch in (4, 1, 1)]
    (setting,) = only(report_page.throughput, *records).figure.axes[0].lines
    first, second, third = (record["decode_throughput"] for record in records)
    assert setting.get_xydata().tolist() == [[1, (second + third) / 2], [4, first]]


def test_runs_of_different_lengths_are_not_joined_and_single_ones_share_a_figure():
    lengths = ((128, 32), (128, 8), (512, 32))
    records = [rich_record(prompt_len=p, gen_len=g, batch_size=batch) for p, g in lengths for batch in (1, 3)]
    titles = {plot.title.partition(", ")[2] for plot in drawn(report_page.throughput, *records)}
    assert titles == {f"prompt {prompt}, {gen} generated" for prompt, gen in lengths}
    assert len(widths(only(report_page.shares_of_limit, *records))) == 3
    plot = only(report_page.throughput, *records[::2])
    assert plot.title == "Throughput: models and lengths with one run" and len(widths(plot)) == 3


def test_scores_are_drawn_with_their_standard_errors():
    plots = drawn(report_page.quality, rich_record(quality=SCORES), rich_record())
    scores = {plot.title: texts(plot)[1] for plot in plots}
    assert scores["Quality: mmlu (%)"] == "42.0 ± 1.2" and scores["Quality: humaneval pass@1 (%)"] == "12.0 ± 2.5"
    assert scores["Quality: perplexity"] == "12.3" and len(plots) == 5


def shown_by_chromium(file, script="", width=1280):
    """The page's elements after its scripts and then `script` ran, which the page's policy must be lifted for."""
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        pytest.skip("no Chromium on this machine (Debian: apt-get install chromium)")
    if script:
        source = re.sub('<meta http-equiv="Content-Security-Policy"[^>]*>', "", file.read_text())
        file = file.with_name("tried.html")
        file.write_text(f"{source}<script>{script}</script>")
    options = ("--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={file.parent / 'profile'}")
    size = f"--window-size={width},900"
    command = [browser, *options, size, "--dump-dom", file.resolve().as_uri()]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout


@pytest.mark.parametrize("width", [500, 1280])
def test_chromium_shows_the_page_without_sideways_scrolling(tmp_path, width):
    page = page_of(tmp_path, odd_records() + many_records(40))
    measure = "document.title = `${innerWidth} ${document.documentElement.scrollWidth}`"
    assert "<title>Runs in" in shown_by_chromium(page.file), "no record runs a script"
    inner, scrolled = map(int, re.search(r"<title>(\d+) (\d+)", shown_by_chromium(page.file, measure, width)).groups())
    assert inner <= width and scrolled <= inner


def test_a_press_on_a_columns_head_sorts_and_a_second_reverses_the_order(committed):
    sort = """const orders = [];
        for (const head of [...document.querySelectorAll("thead span")])
          for (const press of [() => head.click(), () => head.dispatchEvent(new KeyboardEvent("keydown", {key: "Enter"}))]) {
            press();
            orders.push([...document.querySelectorAll("tbody tr")].map((row) =>
              row.cells[head.parentElement.cellIndex].textContent));
          }
        document.title = btoa(unescape(encodeURIComponent(JSON.stringify(orders))));"""
    title = re.search("<title>(.*?)</title>", shown_by_chromium(committed.file, sort))[1]
    orders = json.loads(base64.b64decode(title))
    column = committed.rows[0].index("TTFT (s)")
    values = sorted(committed.column("TTFT (s)"), key=float)
    assert orders[2 * column : 2 * column + 2] == [values, values[::-1]]
    column = committed.rows[0].index("of limit (%)")
    for down, texts in enumerate(orders[2 * column : 2 * column + 2]):  # by value: 100.1 is above 95.8
        assert texts[-1] == "-", "the resident run has no limit in these records"
        assert "100.1" in texts and texts[:-1] == sorted(texts[:-1], key=float, reverse=bool(down))
