"""What a run says of its own times: how far its loops differ, which step stood out, how busy the machine was."""

from __future__ import annotations

import json
import os
import statistics

import pytest

from zero_inference.cli import main
from zero_inference.measure.steadiness import decode_spread, describe_slow_step, load_warning, spread_warning
from zero_inference.records.schema import Loop, MachineLoad
from zero_inference.utils.format import three_digits


def loops_of(*step_s: list[float]) -> list[Loop]:
    return [Loop(prefill_s=0.5, decode_s=sum(steps), total_s=0.5 + sum(steps), step_s=steps) for steps in step_s]


def test_loops_that_differ_are_told_and_warned_of():
    evenness = decode_spread(loops_of([0.1] * 10, [0.1] * 10, [0.125] * 10))
    assert evenness.decode_spread == pytest.approx(0.25) and evenness.slowest_step_over_median == pytest.approx(1.0)
    assert describe_slow_step(evenness) is None  # the table has the range
    assert "25%" in spread_warning(evenness)
    assert spread_warning(decode_spread(loops_of([0.1] * 10, [0.109] * 10))) is None


def test_a_step_that_stands_out_is_told_with_its_place_even_if_the_loops_agree():
    steps = [0.06] * 31
    stalled = [*steps[:6], 1.7, *steps[7:]]
    evenness = decode_spread(loops_of(stalled, stalled))
    assert evenness.decode_spread == 0 and evenness.slowest_step_over_median == pytest.approx(1.7 / 0.06)
    assert evenness.slowest_step_at.step == 7 and evenness.slowest_step_at.step_s == 1.7
    said = describe_slow_step(evenness)
    assert "decode step 7 of loop" in said and "1.700 s, 28.3 times the median step" in said


@pytest.mark.parametrize(
    "loops, words",
    [
        ([[0.1, 0.1, 0.2]], None),  # one loop: no spread
        ([[0.1, 0.1, 0.1, 0.5]], "decode step 4 of loop 1"),
        ([[], [], []], None),  # one token: no decode
        ([[0.1], [0.1]], None),
        ([[0.1, 0.9], [0.1, 0.9]], None),  # of two steps neither is the odd one
    ],
)
def test_nothing_is_said_that_cannot_be_known(loops, words):
    evenness = decode_spread(loops_of(*loops))
    said = describe_slow_step(evenness)
    assert (said is None) if words is None else said.startswith(words)
    assert (evenness.decode_spread is not None) == (len(loops) > 1 and bool(loops[0]))
    assert (evenness.slowest_step_over_median is None) == (len(loops[0]) < 3)


def test_a_load_beyond_the_usable_cores_is_warned_of():
    assert load_warning(MachineLoad(load_average_before=2.0, usable_cores=2.0)) is None
    warning = load_warning(MachineLoad(load_average_before=4.25, usable_cores=2.0))
    assert "before loading" in warning and "4.2" in warning and f"2 of {os.cpu_count()} cores" in warning


def test_a_run_prints_and_records_the_spread_of_its_loops(checkpoints, tmp_path, capfd):
    options = [
        "--model",
        str(checkpoints("opt")),
        *"--engine resident --prompt-len 8 --gen-len 6 --dtype float32".split(),
    ]
    assert main(["run_model.py", *options, "--loops", "3", "--log-file", str(tmp_path / "three.log")]) == 0
    out, err = capfd.readouterr()
    record = json.loads((tmp_path / "three.jsonl").read_text())
    decode = [loop["decode_s"] for loop in record["loops"]]
    assert record["decode_spread"] == pytest.approx((max(decode) - min(decode)) / statistics.median(decode))
    ratios = [max(loop["step_s"]) / statistics.median(loop["step_s"]) for loop in record["loops"]]
    assert record["slowest_step_over_median"] == pytest.approx(max(ratios))
    at = record["slowest_step_at"]
    assert record["loops"][at["loop"] - 1]["step_s"][at["step"] - 1] == at["step_s"]
    assert f"{three_digits(min(decode))} to {three_digits(max(decode))}" in out
    assert ("times the median step" in out) == (max(ratios) > 3)
    assert ("of their median, so" in err) == (record["decode_spread"] > 0.1)
    assert ("load average was" in err) == (record["load_average_before"] > record["usable_cores"])
    assert (tmp_path / "three.log").read_text().count("\n") == 4, "older readers know four lines"
    of_steps = decode_spread(loops_of(*(loop["step_s"] for loop in record["loops"]))).as_dict()
    assert of_steps.keys() | {"load_average_before", "usable_cores", "weights_place"} <= record.keys()
    assert record["decode_latency_max_s"] == pytest.approx(of_steps["decode_latency_max_s"])

    assert main(["run_model.py", *options, "--loops", "1", "--log-file", str(tmp_path / "one.log")]) == 0
    out, err = capfd.readouterr()
    assert "1 loop " in out and "min to max" not in out and "of their median" not in err
    assert json.loads((tmp_path / "one.jsonl").read_text())["decode_spread"] is None
