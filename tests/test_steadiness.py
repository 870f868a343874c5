"""What a run reports of its own times: how far its loops differ, which step stood out, how busy the machine was."""

from __future__ import annotations

import json
import os
import statistics

import pytest

from zero_inference.cli import main
from zero_inference.measure.steadiness import decode_spread, describe_slow_step, load_warning, spread_warning
from zero_inference.records.schema import Loop, MachineLoad


def spread_of(*step_s: list[float]):
    return decode_spread(
        [Loop(prefill_s=0.5, decode_s=sum(steps), total_s=0.5 + sum(steps), step_s=steps) for steps in step_s]
    )


def test_loops_that_differ_are_warned_of():
    spread = spread_of([0.1] * 10, [0.1] * 10, [0.125] * 10)
    assert spread.decode_spread == pytest.approx(0.25) and describe_slow_step(spread) is None
    assert "25%" in spread_warning(spread)
    assert spread_warning(spread_of([0.1] * 10, [0.109] * 10)) is None


def test_a_slow_step_is_named_even_if_the_loops_agree():
    stalled = [0.06] * 6 + [1.7] + [0.06] * 24
    spread = spread_of(stalled, stalled)
    assert spread.decode_spread == 0 and spread.slowest_step_over_median == pytest.approx(1.7 / 0.06)
    assert describe_slow_step(spread).startswith("decode step 7 of loop 1 took 1.700 s, 28.3 times the median step")


@pytest.mark.parametrize("loops", [[[0.1, 0.1, 0.2]], [[], [], []], [[0.1], [0.1]], [[0.1, 0.9], [0.1, 0.9]]])
def test_nothing_is_reported_that_cannot_be_known(loops):
    """The spread of one loop, decode times of one token, the odd one of two steps."""
    spread = spread_of(*loops)
    assert describe_slow_step(spread) is None
    assert (spread.decode_spread is not None) == (len(loops) > 1 and bool(loops[0]))
    assert (spread.slowest_step_over_median is None) == (len(loops[0]) < 3)


def test_a_load_above_the_usable_cores_is_warned_of():
    assert load_warning(MachineLoad(load_average_before=2.0, usable_cores=2.0)) is None
    warning = load_warning(MachineLoad(load_average_before=4.25, usable_cores=2.0))
    assert "4.2" in warning and f"2 of {os.cpu_count()} cores" in warning


def test_a_run_prints_and_records_the_spread_of_its_loops(checkpoints, tmp_path, capfd):
    options = "--engine resident --prompt-len 8 --gen-len 6 --dtype float32 --loops 3 --log-file".split()
    assert main(["run_model.py", "--model", str(checkpoints("opt")), *options, str(tmp_path / "run.log")]) == 0
    out, err = capfd.readouterr()
    record = json.loads((tmp_path / "run.jsonl").read_text())
    decode = [loop["decode_s"] for loop in record["loops"]]
    assert record["decode_spread"] == pytest.approx((max(decode) - min(decode)) / statistics.median(decode))
    ratios = [max(loop["step_s"]) / statistics.median(loop["step_s"]) for loop in record["loops"]]
    assert record["slowest_step_over_median"] == pytest.approx(max(ratios))
    at = record["slowest_step_at"]
    assert record["loops"][at["loop"] - 1]["step_s"][at["step"] - 1] == at["step_s"]
    assert ("times the median step" in out) == (max(ratios) > 3)
    assert ("of their median, so" in err) == (record["decode_spread"] > 0.1)
    assert ("load average was" in err) == (record["load_average_before"] > record["usable_cores"])
