"""What the page's roofline and its predictions draw: positions and words against figures computed here from the records."""

import math
import re
from xml.etree import ElementTree

import pytest
from test_html_report import EVIL, FAILED, committed_records, limit, page_of, rich_record

from zero_inference.records.hardware import HOST_COPY
from zero_inference.report.html.labels import make_runs
from zero_inference.report.html.places import MARK_RADIUS, TEXT_HEIGHT, Box, places_beside
from zero_inference.report.html.roofline import roofline
from zero_inference.report.run import Run
from zero_inference.utils.format import format_bytes, three_digits

SVG = "{http://www.w3.org/2000/svg}"
H200 = {"gpus": [{"name": "H200"}], "cpu_model": "Xeon", "cpu_cores": 16}
MOVED = {"host_to_device_bytes_per_step": 14e9, "disk_read_bytes_per_step": 0, "cores_bytes_per_step": 0}


def figure_of(page, title):
    """The drawing below the first title that begins so, as an element."""
    at = page.source.index(f"<h3>{title}")
    return ElementTree.fromstring(page.source[page.source.index("<svg", at) : page.source.index("</svg>", at) + 6])


def marks(figure, name):
    """Where the marks of the group whose id ends so stand, in points from left and top."""
    (group,) = [each for each in figure.iter(f"{SVG}g") if each.get("id", "").endswith(f"-{name}")]
    return [(float(use.get("x")), float(use.get("y"))) for use in group.iter(f"{SVG}use")]


def line(figure, name):
    (group,) = [each for each in figure.iter(f"{SVG}g") if each.get("id", "").endswith(f"-{name}")]
    return [float(value) for value in re.findall(r"[-\d.]+", group.find(f"{SVG}path").get("d"))]


def ticks(figure, axis):
    """Label and place of an axis's ticks; `axis` is x or y."""
    groups = [each for each in figure.iter(f"{SVG}g") if f"-{axis}tick_" in each.get("id", "")]
    return {
        float(group.find(f".//{SVG}text").text): float(group.find(f".//{SVG}use").get(axis))
        for group in groups
        if group.find(f".//{SVG}text") is not None
    }


def scale(values, places):
    """From a value to its place on a logarithmic axis, by the two values that are farthest apart."""
    (low, first), (high, last) = min(zip(values, places)), max(zip(values, places))
    return lambda value: first + (last - first) * math.log(value / low) / math.log(high / low)


def titles(page, beginning):
    return [title for title in page.texts("h3") if title.startswith(beginning)]


def expected_bytes(record):
    """Bytes a token, by hand: what the link owes and the cores read; of the run on the device, what it reads there."""
    moved, found, steps = record["transfers"], record["limit"], record["gen_len"] - 1
    if found["bound_by"] == "device_memory":
        per_step = found["floor_step_s"]["device_memory"] * found["device_copy_gbps"] * 1e9
    else:
        to_device = moved["host_to_device_bytes_per_step"] - found["link_ahead_bytes"] / steps
        per_step = to_device + moved["cores_bytes_per_step"]
    return per_step / record["batch_size"]


@pytest.fixture(scope="module")
def beside(tmp_path_factory):
    """The page of the committed runs beside their predictions."""
    return page_of(tmp_path_factory.mktemp("beside"), committed_records("h200-beside"))


def test_runs_stand_under_the_roofline_at_their_bytes_and_throughput(beside):
    records = committed_records("h200-beside")
    figure = figure_of(beside, "Roofline: 1 x NVIDIA H200, Intel(R) Xeon(R) Processor with 16 cores")
    drawn = {}
    for bound in ("link", "link_and_cores", "device_memory"):
        expected = {record["decode_throughput"]: record for record in records if record["limit"]["bound_by"] == bound}
        places = marks(figure, f"runs-{bound}")
        assert len(places) == len(expected)
        # the page's order is not that of the files: higher on the page is faster
        drawn |= dict(zip(sorted(expected), sorted(places, key=lambda place: -place[1])))
    by_speed = {record["decode_throughput"]: expected_bytes(record) for record in records}
    assert drawn.keys() == by_speed.keys()
    x_of = scale([by_speed[speed] for speed in drawn], [x for x, _ in drawn.values()])
    y_of = scale(list(drawn), [y for _, y in drawn.values()])
    for speed, (x, y) in drawn.items():
        assert (x, y) == pytest.approx((x_of(by_speed[speed]), y_of(speed)), abs=0.1)
    assert {10.0, 100.0} < ticks(figure, "y").keys() and {1.0, 10.0} < ticks(figure, "x").keys()
    assert all(place == pytest.approx(x_of(gib * 2**30), abs=0.1) for gib, place in ticks(figure, "x").items())
    assert all(place == pytest.approx(y_of(speed), abs=0.1) for speed, place in ticks(figure, "y").items())

    limits = [record["limit"] for record in records]
    rates = {
        "link": max(each["link_gbps"] for each in limits),
        "link_and_cores": max(each.get("link_beside_cores_gbps", 0) + each.get("cores_gbps", 0) for each in limits),
        "device_memory": max(each["device_copy_gbps"] for each in limits),
    }
    for bound, gb_per_s in rates.items():
        left, top, right, bottom = line(figure, f"line-{bound}")
        for nbytes in (0.5e9, 20e9):  # the line goes on where the axes end
            on_line = top + (bottom - top) * (x_of(nbytes) - left) / (right - left)
            assert on_line == pytest.approx(y_of(gb_per_s * 1e9 / nbytes), abs=0.1), bound


def test_a_run_at_its_limit_touches_the_line_and_words_say_how_far_others_are(beside):
    figure = figure_of(beside, "Roofline")
    described = figure.find(f"{SVG}desc").text
    assert described.startswith("link: 55.5 GB/s; link and cores: 67.5 to 159 GB/s; device memory: 4\u202f220 GB/s. ")
    for record in committed_records("h200-beside"):
        assert (
            f"{format_bytes(expected_bytes(record))} a token, {record['limit']['fraction_of_limit']:.1%} of its limit"
            in described
        )
    # llama13b-int4-bs1-off: 99.8% of the link at 7.1 GB a token, so under a point below the line
    left, top, right, bottom = line(figure, "line-link")
    gaps = [y - (top + (bottom - top) * (x - left) / (right - left)) for x, y in marks(figure, "runs-link")]
    assert min(abs(gap) for gap in gaps) < 0.5
    legend = [" ".join(text.split()) for text in beside.texts("text") if "GB/s" in text]
    assert legend[:3] == ["link: 55.5 GB/s", "link and cores: 67.5 to 159 GB/s", "device memory: 4 220 GB/s"]


def test_runs_that_read_the_disk_have_its_line(tmp_path):
    figure = figure_of(page_of(tmp_path, committed_records("h200")), "Roofline")
    (record,) = [record for record in committed_records("h200") if record["disk_offload"]]
    ((x, y),) = marks(figure, "runs-disk")
    left, top, right, bottom = line(figure, "line-disk")
    # its share of the limit is that of tokens that it would take at the disk's rate; an axis unit is a decade
    rate, speed = record["limit"]["disk_gbps"] * 1e9, record["decode_throughput"]
    allowed = rate * record["batch_size"] / record["transfers"]["disk_read_bytes_per_step"]
    link_left, link_top, *_ = line(figure, "line-link")
    decade = (top - link_top) / math.log10(record_rate("h200", "link_gbps") / record["limit"]["disk_gbps"])
    assert link_left == left
    on_line = top + (bottom - top) * (x - left) / (right - left)
    assert y - on_line == pytest.approx(decade * math.log10(allowed / speed), abs=0.1)


def record_rate(folder, key):
    return max(record["limit"][key] for record in committed_records(folder))


def machine_record(link_gbps=55.0, **changes):
    return rich_record(transfers=MOVED, environment=H200, limit=limit(link_gbps=link_gbps)) | changes


def test_each_machine_has_a_roofline_of_its_own(tmp_path):
    other = H200 | {"gpus": [{"name": "L4"}]}
    page = page_of(
        tmp_path / "names", [machine_record(), machine_record(batch_size=1), machine_record(environment=other)]
    )
    assert titles(page, "Roofline") == [
        "Roofline: 1 x H200, Xeon with 16 cores",
        "Roofline: 1 x L4, Xeon with 16 cores",
    ]
    page = page_of(tmp_path / "rates", [machine_record(), machine_record(27.0, batch_size=1), machine_record(26.0)])
    assert titles(page, "Roofline") == [
        "Roofline: 1 x H200, Xeon with 16 cores, link 27 GB/s",
        "Roofline: 1 x H200, Xeon with 16 cores, link 55 GB/s",
    ], "the machine with most runs comes first"
    page = page_of(tmp_path / "one", [machine_record(), machine_record(44.0)])
    assert len(titles(page, "Roofline")) == 1, "a link differs so much from minute to minute"
    assert "link: 44 to 55 GB/s" in page.texts("text")
    alone = {"gpus": [], "cpu_model": "EPYC", "cpu_cores": 2}
    busy = [
        rich_record(
            limit=limit(
                "device_memory",
                0.5,
                floor_step_s={"device_memory": 0.15},
                link_gbps=None,
                link_kind=HOST_COPY,
                device_copy_gbps=rate,
            ),
            environment=alone,
            device="cpu",
            link_use={
                "busy_s": 6.0,
                "slot_wait_s": 3.0,
                "host_late_s": 0.2,
                "step_start_s": 0.1,
                "gbps_while_busy": 54.1,
            },
        )
        for rate in (20.0, 6.0)
    ]
    page = page_of(tmp_path / "host", busy)
    assert titles(page, "Roofline") == ["Roofline: no GPU, EPYC with 2 cores"], (
        "other work on a host makes no other host of it"
    )
    assert not titles(page, "Where the stream engine"), "without a GPU there is no link"
    many = [machine_record(environment=H200 | {"cpu_model": f"CPU {number}"}) for number in range(15)]
    page = page_of(tmp_path / "many", many)
    assert len(titles(page, "Roofline")) == 12 and "Not drawn: 3 more machines." in page.words
    assert "Roofline: 10 more" in " ".join(page.texts("summary")[0].split())


def test_without_a_gpu_there_is_no_link_to_draw(tmp_path):
    rates = {"link_kind": "host memory copy", "device_copy_gbps": 40.0, "floor_step_s": {"device_memory": 0.1}}
    host = {"cpu_model": "Xeon", "gpus": []}
    bounds = limit("device_memory", 0.5, **rates), limit("matmul", 0.9, **rates)
    page = page_of(tmp_path, [machine_record(limit=bound, environment=host) for bound in bounds])
    assert titles(page, "Roofline") == ["Roofline: no GPU, Xeon"]
    figure = figure_of(page, "Roofline")
    assert not [each for each in figure.iter(f"{SVG}g") if each.get("id", "").endswith("line-link")]
    # 0.1 s at 40 GB/s are 4 GB a step of 7 sequences, wherever weights are fetched from
    assert "at 0.532 GiB a token, 50.0% of its limit by device memory" in figure.find(f"{SVG}desc").text
    assert "at 0.532 GiB a token, 90.0% of its limit by matrix products" in figure.find(f"{SVG}desc").text


def test_thousands_of_runs_are_drawn_in_part_and_said_to_be():
    runs = make_runs([Run.read(machine_record()) for _ in range(321)])
    (drawing,) = roofline(runs)
    assert "Of 321 runs here, the first 320 of the table are drawn." in drawing.caption
    assert len(marks(ElementTree.fromstring(drawing.svg), "runs-link")) == 320


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
def test_no_roofline_is_drawn_of_what_a_record_does_not_say(tmp_path, changes):
    page = page_of(tmp_path, [machine_record() | changes])
    assert not titles(page, "Roofline") and not titles(page, "Predicted")


def test_measured_times_stand_at_their_ratio_to_the_prediction(beside):
    records = [record for record in committed_records("h200-beside") if record["predicted"]["decode_s"]]
    figure = figure_of(beside, "Predicted against measured")
    ratios = {
        run_number(beside, record): (
            record["decode_latency_s"] / record["predicted"]["decode_s"],
            record["prefill_latency_s"] / record["predicted"]["prefill_s"],
        )
        for record in records
    }
    assert len(ratios) == 8
    places = {}
    for run, (decode, prefill) in ratios.items():
        ((places[decode], _),), ((places[prefill], _),) = (
            marks(figure, f"decode-of-{run}"),
            marks(figure, f"prefill-of-{run}"),
        )
    x_of = scale(list(places), list(places.values()))
    assert [x_of(ratio) for ratio in places] == pytest.approx(list(places.values()), abs=0.1)
    assert ticks(figure, "x")[1.0] == pytest.approx(x_of(1.0), abs=0.1) and len(ticks(figure, "x")) > 3
    described = figure.find(f"{SVG}desc").text
    said = re.findall(r"#(\d+) [^;]*: decode ([\d.]+), prefill ([\d.]+)", described)
    assert {int(run): (float(decode), float(prefill)) for run, decode, prefill in said} == {
        run: (round(decode, 2), round(prefill, 2)) for run, (decode, prefill) in ratios.items()
    }
    far = [abs(math.log(ratios[int(run)][0])) for run, _, _ in said]
    assert far == sorted(far, reverse=True)
    decodes = sum(0.9 <= decode <= 1.1 for decode, _ in ratios.values())
    prefills = sum(0.85 <= prefill <= 1.15 for _, prefill in ratios.values())
    assert f"{decodes} of 8 decode times are within 10%" in beside.words
    assert f"; {prefills} of 8 prefill times are within 15%" in beside.words
    column = beside.rows[0].index("decode / predicted")
    in_table = [row[column] for row in beside.rows[1:] if row[column] != "-"]
    assert sorted(in_table) == sorted(f"{decode:.2f}" for decode, _ in ratios.values())


def run_number(page, record):
    column = page.rows[0].index("decode (token/s)")
    (number,) = [int(row[0]) for row in page.rows[1:] if row[column] == three_digits(record["decode_throughput"])]
    return number


def test_nothing_is_said_of_predictions_where_no_record_has_one(tmp_path):
    odd = (
        None,
        EVIL,
        3,
        {},
        {"decode_s": None, "prefill_s": None},
        {"decode_s": 0, "prefill_s": -1},
        {"decode_s": EVIL},
    )
    page = page_of(tmp_path, [machine_record(predicted=each) for each in odd])
    assert not titles(page, "Predicted") and "decode / predicted" not in page.rows[0]


def test_one_prediction_is_told_in_words_for_one_and_far_ones_are_arrows(tmp_path):
    record = machine_record(decode_latency_s=9.0, predicted={"decode_s": 1.0, "prefill_s": None})
    page = page_of(tmp_path, [record])
    assert "the decode time is not within 10% of the prediction (inner band). An arrow: beyond the edge." in page.words
    assert "prefill time" not in page.words
    assert "#1 deepspeed, host, fp16: decode 9.00" in page.texts("desc")
    ((x, _),) = marks(figure_of(page, "Predicted"), "decode-of-1")
    assert x == pytest.approx(330 - 14, abs=0.1), "at the right end of the axis"


def test_numbers_beside_marks_cover_nothing(tmp_path):
    within = Box(0, 0, 200, 100)
    spots = [(20 * (number % 9) + 10, 10 + 30 * (number // 9)) for number in range(27)]
    texts = [str(number) for number in range(100, 127)]
    boxes = [Box(x - MARK_RADIUS, y - MARK_RADIUS, x + MARK_RADIUS, y + MARK_RADIUS) for x, y in spots]
    placed = [place for place in places_beside(spots, texts, [], within) if place]
    assert len(placed) > 10
    for x, y in placed:
        box = Box(x - 9, y - TEXT_HEIGHT / 2, x + 9, y + TEXT_HEIGHT / 2)  # three digits are 20 points wide
        assert within.holds(box) and not any(box.overlaps(other) for other in boxes)
        boxes.append(box)
    assert places_beside([(5, 5)] * 3, ["1"] * 3, [], Box(0, 0, 10, 10)) == [None] * 3, "no room at all"
    stem = Box(104, 45, 130, 55)
    (right,), (elsewhere,) = (
        places_beside([(100, 50)], ["7"], [], within),
        places_beside([(100, 50)], ["7"], [stem], within),
    )
    assert right[0] > 104 and elsewhere[0] < 100


def test_hostile_records_are_text_in_titles_legends_and_words(tmp_path):
    own = limit(EVIL, 0.3)
    page = page_of(tmp_path, [machine_record(limit=own, environment={"cpu_model": EVIL, "gpus": [{"name": EVIL}]})])
    assert titles(page, "Roofline") == [f"Roofline: 1 x {EVIL}, {EVIL}"]
    assert page.tags.count("script") == 1 and "img" not in page.tags
    assert "<script>document" not in page.source
