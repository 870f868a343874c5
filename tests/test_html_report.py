"""The page of the report: what it says, that records cannot break it, and how Chromium shows it. Its figures: test_html_figures."""

import base64
import json
import random
import re
import shutil
import statistics
import subprocess
import sys
import time
from html.parser import HTMLParser
from pathlib import Path

import pytest
from test_report import log_block, make_record, run_main

from zero_inference.report.html.page import cause_in_words, label_runs, share_in_words
from zero_inference.report.run import Run
from zero_inference.utils.format import three_digits

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
EVIL = "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
UNMEASURED = ("loops", "limit", "prefill_latency_s", "decode_throughput", "total_throughput")
FAILED = {"status": "failed"} | dict.fromkeys(UNMEASURED)
LINK_USE = {"busy_s": 6.0, "slot_wait_s": 3.0, "host_late_s": 0.3, "step_start_s": 0.7, "gbps_while_busy": 54.07}


def limit(bound_by="link", share=0.93, **more):
    rates = {"link_gbps": 55.4, "device_copy_gbps": 3900.0, "floor_decode_s": 1.0}
    return {**rates, "bound_by": bound_by, "fraction_of_limit": share, **more}


def rich_record(step_s=0.3, **changes):
    """A record with steps, as `make_record` has none."""
    draw = random.Random(str(changes))
    steps = [step_s * draw.lognormvariate(0, 0.02) for _ in range(31)]
    batch = changes.get("batch_size", 7)
    return make_record(
        loops=[{"prefill_s": 0.2, "decode_s": sum(steps), "total_s": 0.2 + sum(steps), "step_s": steps}],
        decode_latency_s=sum(steps),
        decode_throughput=batch * 31 / sum(steps),
        **{"limit": limit(), **changes},
    )


def many_records(count):
    return [
        rich_record(
            step_s=0.01 * (1 + number % 37),
            model=f"organisation/a-model-with-quite-a-long-name-{number // 4 % 9}b-instruct-v0.{number % 3}",
            engine=("deepspeed", "stream", "accelerate", "resident")[number % 4],
            quant_bits=(16, 8, 4)[number // 7 % 3],
            batch_size=2 ** (number // 36 % 7),
            prompt_len=(128, 512)[number % 2],
            transfers={"host_to_device_bytes_per_step": 26e9 / (1 + number % 5)},
            predicted={"decode_s": 0.3 * (1 + number % 37), "prefill_s": 1 / (2.5 + number % 2)},
            link_use=LINK_USE if number % 4 == 1 else None,
        )
        for number in range(count)
    ]


def odd_records():
    scores = {
        "mmlu": {"accuracy": 0.42, "stderr": 0.0123},
        "hellaswag": {"accuracy": 0.51, "acc_norm": 0.55, "acc_norm_stderr": 0.021},
        "humaneval": {"pass_at_k": {"1": 0.12, "10": 0.31}, "n": 10},
        "perplexity": {"perplexity": 12.34},
    }
    return [
        rich_record(quality=scores),
        rich_record(step_s=0.4, quant_bits=4, quality={"mmlu": {"accuracy": 0.397, "stderr": 0.012}}),
        rich_record(model=EVIL, engine=EVIL, limit=limit(EVIL, 0.3),
                    environment={"gpus": [{"name": EVIL}, {"name": 3}, 4]}, quality={EVIL: 0.5}),
        make_record(**FAILED, model="日本語の名前" * 12, engine="$x_1$ \u202eabc \ud800 \x00", error=EVIL + "\n" + "W" * 3000),
        {"status": "ok", "model": "old", "engine": "deepspeed", "batch_size": 4, "decode_throughput": 31.5}, {"status": "ok"}, {},
        {"model": 5, "engine": ["x"], "limit": "odd", "loops": "odd", "quality": [1], "link_use": 3, "batch_size": "many",
         "environment": "none", "decode_throughput": -3, "prefill_latency_s": "1e999"},
        rich_record() | {"loops": [{"step_s": [0.1] * 200 + [0.9, 5.0, None, "x"]}, 3]},
    ]  # fmt: skip


def committed_records(folder):
    return [json.loads(line) for file in sorted((RESULTS / folder).glob("*.jsonl")) for line in file.open()]


def hostile_records():
    """What no run writes: bytes, rates and predictions that are far off, of another kind, or markup."""
    gpu = {"gpus": [{"name": EVIL}], "cpu_model": EVIL, "cpu_cores": "x"}
    moved = (
        *(None, 3, "x", {}, {"host_to_device_bytes_per_step": EVIL}),
        *({"host_to_device_bytes_per_step": value} for value in (1e19, 1e-14, -5, 26e9)),
        {"host_to_device_bytes_per_step": 26e9, "cores_bytes_per_step": 1e18, "disk_read_bytes_per_step": 1e-14},
    )
    limits = (
        limit(share=1e19), limit(share=0), limit(EVIL, 1e-14), limit("disk", 0.5, disk_gbps=1e-14), limit("matmul", 0.3, floor_step_s=[1]),
        limit("link_and_cores", 0.5, cores_gbps=EVIL, link_beside_cores_gbps=0), limit(link_kind=EVIL, link_ahead_bytes=1e19),
        limit("device_memory", 0.3, floor_step_s={"device_memory": 1e-3}),
        limit("device_memory", 0.3, floor_step_s={"device_memory": EVIL}),
    )  # fmt: skip
    predicted = ({"decode_s": 1e-15, "prefill_s": 1e20}, {"decode_s": EVIL, "prefill_s": 0}, EVIL, None)
    return [
        rich_record(
            transfers=each,
            limit=bounds,
            environment=gpu if index % 2 else EVIL,
            world_size=index % 3,
            predicted=predicted[(index + at) % 4],
        )
        for index, each in enumerate(moved)
        for at, bounds in enumerate(limits)
    ]


def page_of(folder, records=None, *options):
    """The page of `records`, which are put into `folder` first, and what is on it."""
    folder.mkdir(exist_ok=True)
    if records is not None:
        (folder / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    file = folder / "page.html"
    assert run_main(folder, "--html", file, *options) == 0
    return Page(file)


class Page(HTMLParser):
    """What a browser would read: texts by tag, attributes, table rows."""

    def __init__(self, file):
        super().__init__()
        self.file, self.source = file, file.read_text(encoding="utf-8")
        self.tags, self.attributes, self.rows, self._path, self._texts = [], [], [], [], []
        self.feed(self.source)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attributes]
        if tag not in ("meta", "br", "img", "link"):
            self._path.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_startendtag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attributes]

    def handle_endtag(self, tag):
        assert self._path.pop() == tag

    def handle_data(self, data):
        self._texts.append((self._path[-1] if self._path else "", data.strip()))
        if {"td", "th"} & set(self._path):
            self.rows[-1][-1] += data.strip()

    def texts(self, *tags):
        return [text for tag, text in self._texts if text and (tag in tags or not tags)]

    @property
    def words(self):
        return " ".join(text for tag, text in self._texts if tag not in ("script", "style"))


@pytest.fixture(scope="module")
def committed(tmp_path_factory):
    """The page of the first committed runs on one H200, without those of its subfolders."""
    folder = tmp_path_factory.mktemp("committed")
    for file in (RESULTS / "h200").glob("*.*"):
        shutil.copy(file, folder)
    assert run_main(folder, "--html", folder / "page.html") == 0
    return Page(folder / "page.html")


def test_the_page_has_every_run_and_the_figures_that_their_records_have_data_for(committed):
    records = [json.loads(file.read_text()) for file in sorted((RESULTS / "h200").glob("*.jsonl"))]
    assert len(committed.rows) == 1 + len(records)
    speeds = {three_digits(record["decode_throughput"]) for record in records}
    column = committed.rows[0].index("decode (token/s)")
    assert {row[column] for row in committed.rows[1:]} == speeds
    fastest = max(records, key=lambda record: record["decode_throughput"])
    assert f"{fastest['decode_throughput']:.0f} token/s in decode" in committed.words
    titles = " ".join(committed.texts("h3"))
    for subject in ("Throughput at batch 8: facebook/opt-13b", "Share of the machine's limit", "Phases", "Step times"):
        assert subject in titles
    assert "link time" not in titles and "Quality" not in titles
    assert len(committed.source) < 400_000


def test_the_page_fetches_nothing_and_its_ids_are_unique(committed):
    assert not {"link", "img", "iframe", "object", "image"} & set(committed.tags)
    fetching = ("src", "href", "xlink:href", "action", "data")
    targets = [value for _, name, value in committed.attributes if name in fetching]
    assert targets and all(value.startswith("#") for value in targets)
    assert "@import" not in committed.source and not re.search(r"url\((?!#)", committed.source)
    ids = [value for _, name, value in committed.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    assert {value[1:] for value in targets} <= set(ids)


def test_every_figure_has_a_role_a_title_and_a_description(committed):
    count = committed.tags.count("svg")
    assert count == committed.tags.count("figure") > 3
    assert [value for tag, name, value in committed.attributes if (tag, name) == ("svg", "role")] == ["img"] * count
    assert len(committed.texts("desc")) == len(committed.texts("title")) - 1 == count


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_colours_have_contrast(committed, theme):
    blocks = re.findall(r":root \{(.*?)\}", committed.source, re.S)
    colours = dict(re.findall(r"--([\w-]+): (#\w{6})", blocks[0] + (blocks[1] if theme == "dark" else "")))
    for name in ("ink", "muted", "link", "bad"):
        assert min(contrast(colours[name], colours[ground]) for ground in ("surface", "raised")) >= 4.5, name
    for number in range(1, 7):
        assert contrast(colours[f"series-{number}"], colours["surface"]) >= 3, number


def contrast(one, other):
    """WCAG 2.2's contrast ratio."""

    def luminance(colour):
        channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear))

    low, high = sorted(map(luminance, (one, other)))
    return (high + 0.05) / (low + 0.05)


def test_text_of_records_stays_text(tmp_path):
    page = page_of(tmp_path, odd_records() + hostile_records())
    assert page.tags.count("script") == 1 and "img" not in page.tags
    assert not any(name.startswith("on") for _, name, _ in page.attributes)
    assert EVIL in page.texts() and "$x_1$" in page.words
    assert not re.search("[\x00\u202e\ud800]", page.source)


def test_quality_is_in_the_row_of_its_run_with_its_error(tmp_path):
    page = page_of(tmp_path, odd_records()[:2])
    head, first, second = page.rows
    expected = {
        "mmlu accuracy": ("42.0 ± 1.2 %", "39.7 ± 1.2 %"),
        "humaneval pass@10": ("31.0 %", "-"),
        "hellaswag acc_norm": ("55.0 ± 2.1 %", "-"),
        "perplexity": ("12.34", "-"),
    }
    assert {name: (first[head.index(name)], second[head.index(name)]) for name in expected} == expected


def looped_record(rates, **changes):
    """A record with one loop for each rate of decode, in token/s."""
    seconds = [7 * 32 / rate for rate in rates]
    loops = [
        {"prefill_s": 0.2, "decode_s": each, "total_s": 0.2 + each, "step_s": [each / 32] * 32} for each in seconds
    ]
    return make_record(loops=loops, decode_throughput=statistics.median(rates), **{"limit": limit(), **changes})


def test_what_the_loops_cannot_tell_apart_is_not_called_fastest(tmp_path):
    near = looped_record((336, 340, 344), engine="stream")
    slow = looped_record((49, 50, 51), engine="accelerate")
    page = page_of(tmp_path, [looped_record((339, 342, 345)), near, slow])
    assert page.texts("strong") == ["deepspeed, host, fp16, batch 7", "stream, host, fp16, batch 7"]
    assert "are the fastest and differ by less than the spread of their loops: 342 to 340 token/s" in page.words
    quiet = looped_record((339.9, 340, 340.1), engine="stream")
    page = page_of(tmp_path / "quiet", [looped_record((341.9, 342, 342.1)), quiet, slow])
    assert page.texts("strong") == ["deepspeed, host, fp16, batch 7"]
    expected = "is fastest: 342 token/s in decode, 1.01 times the next setting (stream, host, fp16, batch 7: 340)."
    assert expected in page.words
    single = page_of(tmp_path / "single", [looped_record((342,)), looped_record((340,), engine="stream")])
    assert "(stream, host, fp16, batch 7: 340); the spread of their loops was not recorded." in single.words
    engines = ("deepspeed", "stream", "accelerate", "resident", "another")
    page = page_of(tmp_path / "many", [looped_record((339, 342, 345), engine=engine) for engine in engines])
    assert len(page.texts("strong")) == 3 and "and 2 more are the fastest" in " ".join(page.words.split())
    assert "is the only run: 50 token/s in decode." in page_of(tmp_path / "one", [slow]).words


def test_the_table_says_in_words_where_weights_are_and_what_binds(tmp_path):
    page = page_of(tmp_path, [rich_record(cpu_offload=False), rich_record(step_s=0.4, quant_bits=4, kv_offload=True)])
    head, *rows = page.rows
    assert head[1:5] == ["model", "decode (token/s)", "of limit (%)", "bound by"]
    assert [(row[head.index("where")], row[head.index("weights")], row[4]) for row in rows] == [
        ("device", "fp16", "link"),
        ("host, KV host", "int4", "link"),
    ]
    assert not {"CPU offload", "KV offload", "weights (bits)"} & set(head)
    assert {row[1] for row in rows} == {"opt-66b"}, "without the organisation, as a phone is narrow"
    assert all(len(row[2].replace(".", "")) == 3 for row in rows), "three digits"


def test_the_memory_of_a_run_on_a_cpu_is_the_host_s(tmp_path):
    on_cpu = dict(
        device="cpu", limit=limit("device_memory", floor_step_s={"device_memory": 0.1}, link_kind="host memory copy")
    )
    page = page_of(tmp_path, [rich_record(**on_cpu), rich_record(step_s=0.4, **on_cpu)])
    assert [row[4] for row in page.rows[1:]] == ["host memory"] * 2
    assert "of the host memory limit (3900 GB/s)" in page.words
    assert "device memory" not in (tmp_path / "page.html").read_text()


def test_words_on_the_limit_are_the_same_for_new_and_old_records():
    def words(**changes):
        (run,) = label_runs([Run.read(make_record(**changes))])
        return share_in_words(run), cause_in_words(run)

    products = limit("matmul", 0.912, matmul_tflops=600.0)
    assert words(limit=products) == ("91.2% of the matrix products limit (600 TFLOP/s)", "")
    both = limit("link_and_cores", 0.95, link_beside_cores_gbps=49.0, cores_gbps=99.8)
    assert words(limit=both) == ("95.0% of the link and cores limit (49.0 and 99.8 GB/s)", "")
    old = {"link_gbps": 55.4, "floor_decode_s": 1.0, "fraction_of_limit": 0.2}
    moved = {"host_to_device_bytes_per_step": 26e9, "disk_read_bytes_per_step": 0}
    share, cause = words(limit=old, transfers=moved)
    assert share == "20.0% of the link limit (24.2 GiB a step at 55.4 GB/s)" and "--engine stream" in cause
    disk = words(limit=old | {"disk_gbps": 2.0}, transfers=moved | {"disk_read_bytes_per_step": 25e9})
    assert disk[0] == "20.0% of the disk limit (23.3 GiB a step at 2.00 GB/s)"
    assert words(limit=None) == ("", "")
    for bound in ("device_memory", "matmul", "link", "disk"):
        assert "--" in words(limit=limit(bound, 0.3), engine="stream")[1], "a slow run has an option to try"


def test_a_throughput_that_varies_manifold_is_given_as_its_range(tmp_path):
    """On a busy host the same run took 17 times as long: neither of the two, nor what lies between, is a headline."""
    records = [rich_record(step_s=0.01), rich_record(step_s=0.17)]
    page = page_of(tmp_path, records)
    high, low = (f"{record['decode_throughput']:.3g}" for record in records)
    assert f"{low} to {high} token/s in" in page.words and "differ 17-fold" in page.words
    steady = page_of(tmp_path, [rich_record(step_s=0.01), rich_record(step_s=0.011)])
    assert "-fold" not in steady.words


def test_failed_runs_are_listed_with_their_error_and_are_never_the_fastest(tmp_path):
    failed = rich_record(status="failed", error="out of memory: asked 12 GiB", step_s=0.001, quant_bits=4)
    page = page_of(tmp_path, [failed, rich_record()])
    assert "out of memory: asked 12 GiB" in page.texts("pre")
    assert "2 runs of 1 model; 1 failed." in page.words
    assert page.texts("strong") == ["deepspeed, host, fp16, batch 7"]
    assert page.rows[2][page.rows[0].index("status")] == "failed"
    only = page_of(tmp_path / "only", [make_record(**FAILED, error="no room")])
    assert "No run has a throughput to compare: see the failed runs below." in only.words and "no room" in only.words


def test_an_empty_folder_gets_a_page_that_says_so(tmp_path, capsys):
    page = page_of(tmp_path)
    assert "No runs yet" in page.texts("h2") and "svg" not in page.tags
    assert "warning: no run in the .log and .jsonl" in capsys.readouterr().err


def test_logs_without_records_and_single_runs_have_a_page(tmp_path):
    log_block(tmp_path, "ds-opt-66b-bs7-prompt129-gen33-n1x1-cpu", make_record())
    page = page_of(tmp_path)
    assert "1 run of 1 model." in page.words and len(page.rows) == 2
    titles = " ".join(page.texts("h3"))
    assert "Phases" in titles and "Step" not in titles


def test_the_pages_order_is_that_of_sort_and_its_columns_those_of_all_columns(tmp_path):
    records = [rich_record(step_s=step, batch_size=batch) for step, batch in ((0.3, 2), (0.1, 1), (0.2, 2), (0.15, 4))]
    page = page_of(tmp_path, records)
    speed, size = page.rows[0].index("decode (token/s)"), page.rows[0].index("batch")
    speeds = [float(row[speed]) for row in page.rows[1:]]
    assert [row[size] for row in page.rows[1:]] == ["1", "2", "2", "4"]
    assert speeds[1] > speeds[2], "equal work, fastest first"
    assert "batch and length stand together, the fastest first" in page.words
    page = page_of(tmp_path, records, "--sort", "batch_size", "--all-columns")
    assert "stand together" not in page.words
    head, *rows = page.rows
    assert [row[head.index("batch")] for row in rows] == ["1", "2", "2", "4"] and "ids sha256" in head


def test_a_file_that_cannot_be_written_is_bad_usage(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps(make_record()) + "\n")
    done = subprocess.run(
        [sys.executable, "-m", "zero_inference", "report", tmp_path, "--html", tmp_path / "gone" / "page.html"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and "page.html cannot be written (No such file or directory)" in done.stderr


def test_the_page_of_many_runs_is_small_and_made_in_seconds(tmp_path):
    start = time.monotonic()
    page = page_of(tmp_path, many_records(40) * 40)
    assert len(page.rows) == 1601 and len(page.source) < 3_000_000
    assert time.monotonic() - start < 60


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


def test_chromium_runs_no_script_but_the_pages_own(tmp_path):
    page = page_of(tmp_path, odd_records())
    assert "<title>Runs in" in shown_by_chromium(page.file)
    page.file.write_text(page.source + "<script>document.title = 'owned'</script>")
    assert "<title>Runs in" in shown_by_chromium(page.file), "held off by the policy"


@pytest.mark.parametrize("width", [500, 1280])
def test_chromium_shows_the_page_without_sideways_scrolling(tmp_path, width):
    page = page_of(tmp_path, odd_records() + many_records(40))
    measure = "document.title = `${innerWidth} ${document.documentElement.scrollWidth}`"
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
    column = committed.rows[0].index("prefill (s)")
    values = sorted((row[column] for row in committed.rows[1:]), key=float)
    assert orders[2 * column : 2 * column + 2] == [values, values[::-1]]
    column = committed.rows[0].index("of limit (%)")
    for down, texts in enumerate(orders[2 * column : 2 * column + 2]):  # by value: 100.1 is above 95.8
        assert texts[-1] == "-", "the resident run has no limit in these records"
        assert {"100.1", "95.8", "17.2", "16.8"} < set(texts)
        assert texts[:-1] == sorted(texts[:-1], key=float, reverse=bool(down))
