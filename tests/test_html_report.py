"""The report's page: what it says and draws, that records cannot break it, and how Chromium shows and prints it."""

import json
import random
import re
import shutil
import statistics
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from browser import Browser, chromium
from test_report import log_block, make_record, run_main

from zero_inference.report.html import summary
from zero_inference.report.html.labels import make_runs
from zero_inference.report.run import Run
from zero_inference.utils.format import three_digits

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
EVIL = "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
FAILED = {
    "status": "failed",
    "loops": None,
    "limit": None,
    "prefill_latency_s": None,
    "decode_throughput": None,
    "total_throughput": None,
}


def limit(bound_by="link", share=0.93, **more):
    return {
        "link_gbps": 55.4,
        "device_copy_gbps": 3900.0,
        "bound_by": bound_by,
        "floor_decode_s": 1.0,
        "fraction_of_limit": share,
    } | more


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
    records = []
    for number in range(count):
        engine = ("deepspeed", "stream", "accelerate", "resident")[number % 4]
        use = {
            "link_use": {
                "busy_s": 6.0,
                "slot_wait_s": 3.0,
                "host_late_s": 0.2,
                "step_start_s": 0.1,
                "gbps_while_busy": 54.1,
            }
        }
        records.append(
            rich_record(
                step_s=0.01 * (1 + number % 37),
                model=f"organisation/a-model-with-quite-a-long-name-{number // 4 % 9}b-instruct-v0.{number % 3}",
                engine=engine,
                quant_bits=(16, 8, 4)[number // 7 % 3],
                batch_size=2 ** (number // 36 % 7),
                prompt_len=(128, 512)[number % 2],
                cpu_offload=number % 3 > 0,
                disk_offload=number % 3 == 0,
                transfers={"host_to_device_bytes_per_step": 26e9 / (1 + number % 5)},
                predicted={"decode_s": 0.3 * (1 + number % 37), "prefill_s": 1 / (2.5 + number % 2)},
                **(use if engine == "stream" else {}),
            )
        )
    return records


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


KINDS = {
    "empty": list,
    "single": lambda: [rich_record()],
    "beside": lambda: committed_records("h200-beside"),
    "single beside": lambda: committed_records("h200-beside")[1:2],
    "odd": odd_records,
    "hostile": hostile_records,
    "forty": lambda: many_records(40),
}


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


@pytest.fixture(scope="module")
def pages(tmp_path_factory, committed):
    """kind of `KINDS` -> its page; made once, as many runs take seconds."""
    made = {"committed": committed}

    def get(kind):
        if kind not in made:
            made[kind] = page_of(tmp_path_factory.mktemp("page"), KINDS[kind]())
        return made[kind]

    return get


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    if chromium() is None:
        pytest.skip("no Chromium on this machine (Debian: apt-get install chromium), so no page can be shown")
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


def test_the_page_of_committed_runs_has_every_run_and_every_subject_they_tell_of(committed):
    records = [json.loads(file.read_text()) for file in sorted((RESULTS / "h200").glob("*.jsonl"))]
    assert len(committed.rows) == 1 + len(records)
    speeds = {three_digits(record["decode_throughput"]) for record in records}
    column = committed.rows[0].index("decode (token/s)")
    assert {row[column] for row in committed.rows[1:]} == speeds
    fastest = max(records, key=lambda record: record["decode_throughput"])
    assert f"{fastest['decode_throughput']:.0f} token/s in decode" in committed.words
    titles = committed.texts("h3")
    for subject in (
        "Throughput at batch 8: facebook/opt-13b",
        "Share of the machine's limit",
        "Phases",
        "Step times",
    ):
        assert any(title.startswith(subject) for title in titles), subject
    assert not any("link time" in title or "Quality" in title for title in titles)
    assert len(committed.source) < 400_000


def test_the_page_needs_nothing_beside_it(committed):
    assert not {"link", "img", "iframe", "object", "image"} & set(committed.tags)
    targets = [
        value for _, name, value in committed.attributes if name in ("src", "href", "xlink:href", "action", "data")
    ]
    assert targets and all(value.startswith("#") for value in targets)
    assert "@import" not in committed.source and not re.search(r"url\((?!#)", committed.source)
    ids = [value for _, name, value in committed.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    assert {value[1:] for value in targets} <= set(ids)


def test_every_figure_is_named_and_described_for_who_cannot_see_it(committed):
    assert committed.tags.count("svg") == committed.tags.count("figure") > 3
    assert [value for tag, name, value in committed.attributes if (tag, name) == ("svg", "role")] == [
        "img"
    ] * committed.tags.count("svg")
    shares = next(text for text in committed.texts("desc") if ": 97.9%" in text)
    rows = [float(share) for share in re.findall(r": ([\d.]+)%", shares)]
    assert {97.9, 95.8, 17.2, 16.8} <= set(rows) and rows == sorted(rows, reverse=True)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_colours_stand_out_and_differ_to_the_colour_blind(committed, theme):
    blocks = re.findall(r":root \{(.*?)\}", committed.source, re.S)
    colours = dict(re.findall(r"--([\w-]+): (#\w{6})", blocks[0] + (blocks[1] if theme == "dark" else "")))
    for name, least in (
        ("ink", 4.5),
        ("muted", 4.5),
        ("link", 4.5),
        ("bad", 4.5),
        *((f"series-{i}", 3.0) for i in range(1, 7)),
    ):
        for ground in ("surface", "raised") if least > 4 else ("surface",):
            assert contrast(colours[name], colours[ground]) >= least, (name, ground)
    series = [colours[f"series-{i}"] for i in range(1, 7)]
    for index, one in enumerate(series):
        for other in series[:index]:
            for vision in VISION:
                assert distance(seen(one, vision), seen(other, vision)) > 15, (
                    one,
                    other,
                    vision,
                )  # 2.3 is just noticeable


# Machado, Oliveira and Fernandes 2009, severity 1.0, on linear RGB.
VISION = {
    "full": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deuteranopia": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
    "tritanopia": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900)),
}


def linear(colour):
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    return [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]


def contrast(one, other):
    """WCAG 2.2's contrast ratio."""
    low, high = sorted(sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear(colour))) for colour in (one, other))
    return (high + 0.05) / (low + 0.05)


def seen(colour, vision):
    return [min(1, max(0, sum(w * c for w, c in zip(row, linear(colour))))) for row in VISION[vision]]


def distance(one, other):
    """CIE76 difference of two linear RGB colours."""

    def lab(rgb):
        rows = ((0.4124, 0.3576, 0.1805), (0.2126, 0.7152, 0.0722), (0.0193, 0.1192, 0.9505))
        xyz = [sum(w * c for w, c in zip(row, rgb)) / white for row, white in zip(rows, (0.9505, 1, 1.089))]
        x, y, z = (t ** (1 / 3) if t > 0.008856 else 7.787 * t + 16 / 116 for t in xyz)
        return 116 * y - 16, 500 * (x - y), 200 * (y - z)

    return sum((a - b) ** 2 for a, b in zip(lab(one), lab(other))) ** 0.5


def test_text_of_records_stays_text(tmp_path):
    page = page_of(tmp_path, odd_records())
    assert page.tags.count("script") == 1 and "img" not in page.tags
    assert not any(name.startswith("on") for _, name, _ in page.attributes)
    assert EVIL in page.texts() and "$x_1$" in page.words
    assert not re.search("[\x00\u202e\ud800]", page.source)


def test_quality_stands_in_the_runs_row_with_its_error_and_in_a_figure(tmp_path):
    page = page_of(tmp_path, odd_records()[:2])
    head, first, second = page.rows
    assert [row[head.index("mmlu accuracy")] for row in (first, second)] == ["42.0 ± 1.2 %", "39.7 ± 1.2 %"]
    assert first[head.index("humaneval pass@10")] == "31.0 %" and second[head.index("humaneval pass@10")] == "-"
    assert (
        first[head.index("hellaswag acc_norm")] == "55.0 ± 2.1 %"
        and first[head.index("hellaswag accuracy")] == "51.0 %"
    )
    assert first[head.index("perplexity")] == "12.34"
    assert {"Quality: mmlu accuracy", "Quality: perplexity", "Quality: humaneval pass@1"} < set(page.texts("h3"))


def test_pass_at_k_has_its_standard_errors(tmp_path):
    scores = {"humaneval": {"pass_at_k": {"1": 0.12, "10": 0.31}, "stderr": {"1": 0.0254, "10": None}, "n": 10}}
    page = page_of(tmp_path, [rich_record(quality=scores)])
    head, row = page.rows
    assert row[head.index("humaneval pass@1")] == "12.0 ± 2.5 %" and row[head.index("humaneval pass@10")] == "31.0 %"
    assert any(text.endswith(": 12.0 ± 2.5 %") for text in page.texts("desc"))


def test_runs_of_different_lengths_are_not_joined_in_a_line_or_a_median(tmp_path):
    lengths = ((128, 32), (128, 8), (512, 32))
    records = [
        rich_record(prompt_len=prompt, gen_len=gen, batch_size=batch, limit=limit(share=0.1 * batch))
        for prompt, gen in lengths
        for batch in (1, 3)
    ]
    page = page_of(tmp_path, records)
    throughput = [title for title in page.texts("h3") if title.startswith("Throughput")]
    named = [f"prompt {prompt}, {gen} generated" for prompt, gen in lengths]
    assert sorted(title.partition(", ")[2] for title in throughput) == sorted(named)
    shares = next(text for text in page.texts("desc") if "(2 runs)" in text)
    assert shares.count("20.0% (2 runs)") == 3 and all(name in shares for name in named)
    assert len(page.texts("strong")) == 3, "nor held against each other"
    assert any("prompt 128, 8 generated" in text for text in page.texts("desc"))


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
    assert "are the fastest, too close for the spread of their loops to tell apart: 342 to 340 token/s" in page.words
    quiet = looped_record((339.9, 340, 340.1), engine="stream")
    page = page_of(tmp_path / "quiet", [looped_record((341.9, 342, 342.1)), quiet, slow])
    assert page.texts("strong") == ["deepspeed, host, fp16, batch 7"]
    assert (
        "is fastest: 342 token/s in decode, 1.01 times the next setting (stream, host, fp16, batch 7: 340)."
        in page.words
    )
    single = page_of(tmp_path / "single", [looped_record((342,)), looped_record((340,), engine="stream")])
    assert "(stream, host, fp16, batch 7: 340); the spread of their loops was not recorded." in single.words
    engines = ("deepspeed", "stream", "accelerate", "resident", "another")
    page = page_of(tmp_path / "many", [looped_record((339, 342, 345), engine=engine) for engine in engines])
    assert len(page.texts("strong")) == 3 and "and 2 more are the fastest" in " ".join(page.words.split())
    assert "is the only run: 50 token/s in decode." in page_of(tmp_path / "one", [slow]).words


def test_the_loops_of_a_record_spread_as_their_times_do():
    def spread(*times, key="decode_s"):
        return Run.read({"loops": [{"decode_s": each} for each in times]}).loop_spread(key)

    assert spread(1.0, 1.2, 0.9) == pytest.approx(0.3) and spread(2.0, 2.0) == 0
    assert (
        spread(1.0) is None
        and spread() is None
        and spread(1.0, None, "x") is None
        and spread(1.0, 2.0, key="total_s") is None
    )
    assert Run.read({"loops": 3}).loop_spread("decode_s") is None


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
    assert "bound by host memory (3900 GB/s)" in page.words
    assert "device memory" not in (tmp_path / "page.html").read_text()


def test_link_time_is_drawn_for_the_runs_that_observed_it(tmp_path):
    use = {"busy_s": 6.0, "slot_wait_s": 3.0, "host_late_s": 0.3, "step_start_s": 0.7, "gbps_while_busy": 54.07}
    page = page_of(
        tmp_path,
        [rich_record(step_s=0.2, engine="stream", link_use=use, limit=limit(share=0.55)), rich_record(link_use=None)],
    )
    assert any(text.startswith("Where the stream engine's link time went") for text in page.texts("h3"))
    assert "#1 stream, host, fp16: 54.1 GB/s" in page.texts("desc")
    assert "mostly because the device computes longer than a layer copies" in page.words


def test_what_binds_is_said_for_new_and_old_records_alike():
    def bound(**changes):
        return summary.bound_in_words(make_runs([Run.read(make_record(**changes))])[0])

    assert (
        bound(limit=limit("matmul", 0.912, matmul_tflops=600.0))
        == "It is bound by matrix products (600 TFLOP/s) and reaches 91.2% of that limit."
    )
    both = limit("link_and_cores", 0.95, link_beside_cores_gbps=49.0, cores_gbps=99.8)
    words = "It is bound by the link (49.0 GB/s) and the host's cores (99.8 GB/s) and reaches 95.0% of that limit."
    assert bound(limit=both) == words
    old = {"link_gbps": 55.4, "floor_decode_s": 1.0, "fraction_of_limit": 0.2}
    moved = {"host_to_device_bytes_per_step": 26e9, "disk_read_bytes_per_step": 0}
    assert bound(limit=old, transfers=moved) == (
        "It reaches 20.0% of the nearest limit, the host-to-device link (24.2 GiB a step at 55.4 GB/s): "
        "copies wait for the computation, and --engine stream copies meanwhile."
    )
    disk = bound(limit=old | {"disk_gbps": 2.0}, transfers=moved | {"disk_read_bytes_per_step": 25e9})
    assert "of the nearest limit, the disk (23.3 GiB a step at 2.00 GB/s)" in disk
    assert bound(limit=None) == "What bounds it was not measured."
    for bound_by in ("device_memory", "matmul", "link", "disk"):  # no end without what to do
        assert "--" in bound(limit=limit(bound_by, 0.3), engine="stream") and "something else" not in bound(
            limit=limit(bound_by, 0.3)
        )


def test_a_throughput_that_varies_manifold_is_given_as_its_range(tmp_path):
    """On a busy host the same run took 17 times as long: neither of the two, nor what lies between, is a headline."""
    page = page_of(tmp_path, [rich_record(step_s=0.01), rich_record(step_s=0.17)])
    rates = [
        run.decode_throughput for run in make_runs([Run.read(rich_record(step_s=step_s)) for step_s in (0.01, 0.17)])
    ]
    low, high = (f"{each:.3g}" for each in sorted(rates))
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
    assert any(title.startswith("Phases") for title in page.texts("h3")) and not any(
        "Step" in title for title in page.texts("h3")
    )


def test_many_runs_are_drawn_in_parts_of_which_the_first_is_open(pages):
    page = pages("forty")
    assert len(page.rows) == 41
    titles = page.texts("h3")
    parts = [title for title in titles if title.startswith("Step times")]
    assert (
        len(parts) == 3
        and parts[0] == "Step times (runs 1 to 16 of 40)"
        and parts[-1] == "Step times (runs 33 to 40 of 40)"
    )
    assert page.tags.count("details") >= 3 and len(page.source) < 900_000


def test_the_pages_order_is_that_of_sort_and_its_columns_those_of_all_columns(tmp_path):
    records = [rich_record(step_s=step, batch_size=batch) for step, batch in ((0.3, 2), (0.1, 1), (0.2, 2), (0.15, 4))]
    page = page_of(tmp_path, records)
    speed, size = page.rows[0].index("decode (token/s)"), page.rows[0].index("batch")
    speeds = [float(row[speed]) for row in page.rows[1:]]
    assert [row[size] for row in page.rows[1:]] == ["1", "2", "2", "4"] and speeds[1] > speeds[2], (
        "equal work, fastest first"
    )
    assert "batch and length stand together, the fastest first" in page.words
    page = page_of(tmp_path, records, "--sort", "batch_size", "--all-columns")
    assert "stand together" not in page.words
    assert [row[page.rows[0].index("batch")] for row in page.rows[1:]] == [
        "1",
        "2",
        "2",
        "4",
    ] and "ids sha256" in page.rows[0]


def test_a_file_that_cannot_be_written_is_bad_usage(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps(make_record()) + "\n")
    done = subprocess.run(
        [sys.executable, "-m", "zero_inference", "report", tmp_path, "--html", tmp_path / "gone" / "page.html"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and "page.html cannot be written (No such file or directory)" in done.stderr


SHOWN = """(() => {
  const inside = (element) => element.closest(".scroll, details:not([open])");
  const boxes = [...document.querySelectorAll("svg")].filter((svg) => !inside(svg)).map((svg) => [svg.getBoundingClientRect(),
    [...svg.querySelectorAll("text")].filter((text) => text.textContent.trim())
      .map((text) => [text.getBoundingClientRect(), text])]);
  const overlap = (a, b) =>
    Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1
    && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 4;
  return {
    width: innerWidth, scrolled: document.documentElement.scrollWidth, title: document.title,
    wide: [...document.querySelectorAll("body *")]
      .filter((e) => !inside(e) && e.getBoundingClientRect().right > innerWidth + 1)
      .map((e) => e.outerHTML.slice(0, 80)),
    cut: boxes.flatMap(([box, texts]) => texts
      .filter(([t]) => t.left < box.left - 1 || t.right > box.right + 1 || t.bottom > box.bottom + 1)
      .map(([, text]) => text.textContent)),
    covered: boxes.flatMap(([, texts]) => texts.flatMap(([t, text], i) => texts.slice(i + 1).filter(([u]) => overlap(t, u))
      .map(([, other]) => text.textContent + " | " + other.textContent))),
    smallest: Math.min(...boxes.flatMap(([, texts]) => texts
      .map(([, text]) => parseFloat(getComputedStyle(text).fontSize) * text.getScreenCTM().a))),
  };
})()"""


@pytest.mark.parametrize(
    "width, phone, dark",
    [(390, True, False), (390, True, True), (1280, False, False)],
    ids=["phone", "phone-dark", "desktop"],
)
@pytest.mark.parametrize("kind", ["committed", *KINDS])
def test_chromium_shows_the_page_without_overflow_cut_or_covered_text(
    kind, width, phone, dark, browser, pages, tmp_path
):
    page = pages(kind)
    browser.open(page.file, width, 844, phone, dark)
    shown = browser.evaluate(SHOWN)
    assert shown["width"] == width and shown["scrolled"] <= width and shown["wide"] == []
    assert shown["title"].startswith("Runs in")
    assert shown["cut"] == [] and shown["covered"] == []
    assert kind == "empty" or shown["smallest"] >= 11
    troubles = [
        event["params"]
        for event in browser.events
        if event.get("method") in ("Log.entryAdded", "Runtime.exceptionThrown")
    ]
    assert troubles == []
    asked_for = {
        event["params"]["request"]["url"]
        for event in browser.events
        if event.get("method") == "Network.requestWillBeSent"
    }
    assert asked_for == {page.file.resolve().as_uri()}
    browser.screenshot(tmp_path / "page.png")
    assert len(set((tmp_path / "page.png").read_bytes())) > 100


FIRST_SCREEN = """(() => {
  const box = (selector) => document.querySelector(selector).getBoundingClientRect();
  return {figure: box("figure svg").bottom, figures: document.querySelectorAll(".leading svg").length,
    headline: box(".lead .headline").bottom,
    scrolls: [...document.querySelectorAll("table")].every((table) => table.closest(".scroll").clientWidth <= innerWidth)};
})()"""


@pytest.mark.parametrize("width, height, phone", [(390, 844, True), (1280, 800, False)], ids=["phone", "desktop"])
@pytest.mark.parametrize("kind", ["committed", "single", "beside", "forty"])
def test_the_best_run_and_the_throughput_figure_are_on_the_first_screen(kind, width, height, phone, browser, pages):
    browser.open(pages(kind).file, width, height, phone)
    shown = browser.evaluate(FIRST_SCREEN)
    assert 0 < shown["headline"] < height / 2
    assert shown["figures"] == 1 and shown["figure"] <= height and shown["scrolls"]


def test_one_batch_size_is_drawn_as_bars_with_the_limit_and_several_as_lines(tmp_path):
    bars = page_of(
        tmp_path / "bars", [rich_record(step_s=step, quant_bits=bits) for step, bits in ((0.3, 16), (0.1, 4))]
    )
    title = next(title for title in bars.texts("h3") if title.startswith("Throughput"))
    assert title == "Throughput at batch 7: facebook/opt-66b, prompt 129, 33 generated"
    rows = next(text for text in bars.texts("desc") if "token/s" in text)
    assert [row.partition(":")[0] for row in rows.split("; ")] == ["deepspeed, host, int4", "deepspeed, host, fp16"]
    assert "The upright line is the limit" in bars.words
    lines = page_of(tmp_path / "lines", [rich_record(batch_size=batch) for batch in (1, 4)])
    assert any(title.startswith("Throughput against batch size") for title in lines.texts("h3"))


def test_models_with_a_single_run_share_one_figure(tmp_path):
    page = page_of(tmp_path, [rich_record(model=f"org/model-{size}b", batch_size=size) for size in (7, 13, 70)])
    titles = [title for title in page.texts("h3") if title.startswith("Throughput")]
    assert titles == ["Throughput: models and lengths with one run"]
    rows = next(text for text in page.texts("desc") if "token/s" in text)
    assert all(f"model-{size}b, batch {size}, prompt 129, 33 generated" in rows for size in (7, 13, 70))


def test_runs_with_other_options_are_settings_of_their_own(tmp_path):
    def run(*options, **changes):
        return rich_record(engine="stream", argv=["run_model.py", *options], **changes)

    records = [run("--gpu-memory", "20"), run("--gpu_memory=3.5", step_s=0.4), run("--seed", "3", step_s=0.5)]
    page = page_of(tmp_path, [*records, run("--seed", "4", step_s=0.5)])
    rows = next(text for text in page.texts("desc") if "(2 runs)" in text and "token/s" in text)
    names = [row.partition(":")[0] for row in rows.split("; ")]
    assert names == ["stream, host, fp16, gpu-memory 20", "stream, host, fp16, gpu-memory 3.5", "stream, host, fp16"]


def test_a_press_on_a_columns_head_sorts_and_a_second_turns_the_order(browser, committed):
    browser.open(committed.file, 1280, 844)
    column = committed.rows[0].index("prefill (s)")
    press = f"document.querySelectorAll('thead span')[{column}].click()"
    read = f"[...document.querySelectorAll('tbody tr')].map((row) => row.cells[{column}].textContent)"
    orders = [browser.evaluate(f"{press}, {read}")]
    browser.evaluate(f"document.querySelectorAll('thead span')[{column}].focus()")
    browser.call("Input.dispatchKeyEvent", type="keyDown", key="Enter")
    orders.append(browser.evaluate(read))
    values = sorted((row[column] for row in committed.rows[1:]), key=float)
    assert orders == [values, values[::-1]]
    limits = committed.rows[0].index("of limit (%)")
    for down in (False, True):  # by value: 100.1 is above 95.8, and 17.2 above 16.8
        texts = browser.evaluate(
            f"document.querySelectorAll('thead span')[{limits}].click(), "
            f"[...document.querySelectorAll('tbody tr')].map((row) => row.cells[{limits}].textContent)"
        )
        assert texts[-1] == "-", "the resident run has no limit in these records"
        assert {"100.1", "95.8", "17.2", "16.8"} < set(texts)
        assert texts[:-1] == sorted(texts[:-1], key=float, reverse=down)


def test_chromium_prints_all_columns_of_the_table(browser, committed, tmp_path):
    browser.open(committed.file, 1280, 844)
    browser.pdf(tmp_path / "page.pdf")
    assert (tmp_path / "page.pdf").read_bytes().startswith(b"%PDF-")
    browser.call("Emulation.setEmulatedMedia", media="print")
    # Within the margins of A4 across: 297 mm less twice 12, at 96 pixels an inch.
    browser.call("Emulation.setDeviceMetricsOverride", width=1031, height=700, deviceScaleFactor=1, mobile=False)
    assert browser.evaluate("document.querySelector('table').getBoundingClientRect().right") <= 1031
    browser.call("Emulation.setEmulatedMedia", media="")
