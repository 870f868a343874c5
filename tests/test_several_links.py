"""Rates beside the links of several GPUs: as a hardware profile has them, between and beyond what was measured, and as they are assumed."""

from __future__ import annotations

import pytest
from conftest import ROOT, replace
from test_machine import CORES, H200, MACHINE, rates, work

from zero_inference.errors import UsageError
from zero_inference.hardware.profile import (
    CpuAttentionRate,
    CpuProductRate,
    HardwareProfile,
    concurrent_rates,
    links_gb_per_s,
    read_profile,
)
from zero_inference.hardware.spec import parse_assumed, typical_machines


def links(gpus: int, *points: CpuProductRate, alone: float | None = None) -> HardwareProfile:
    """`MACHINE` with so many GPUs, whose links have `alone` GB/s together, and the products that were measured beside all of them."""
    many = tuple(replace(each, gpus=gpus) for each in points)
    cores = replace(CORES, products=(*CORES.products, *many))
    return replace(MACHINE, gpus=(H200,) * gpus, all_links_gb_per_s=alone, cores=cores)


def test_rates_beside_several_links_are_those_that_were_measured():
    """Between one and all of them times lie on straight lines: of the bytes of one link, and of those that the CPU reads."""
    points = rates("int4", 1, 60.0, link=120.0, hand_off_s=3e-4), rates("int4", 32, 40.0, link=140.0, hand_off_s=5e-4)
    four = links(4, *points, alone=160.0)
    found = {gpus: concurrent_rates(four, work("int4", 1), gpus) for gpus in (1, 2, 4)}
    assert found[1] == concurrent_rates(MACHINE, work("int4", 1))
    assert [each.gpus for each in found.values()] == [1, 2, 4]
    all_of_it = found[4].link_alone_gb_per_s, found[4].link_gb_per_s, found[4].cores_gb_per_s, found[4].hand_off_s
    assert all_of_it == pytest.approx((160.0, 120.0, 60.0, 3e-4))
    # one link takes 1 / 50 s for a GB, each of four 4 / 120, and alone 1 / 55 and 4 / 160
    third = (4 / 120 - 1 / 50) / 3
    assert found[2].link_gb_per_s == pytest.approx(2 / (1 / 50 + third))
    assert found[2].link_alone_gb_per_s == pytest.approx(2 / (1 / 55 + (4 / 160 - 1 / 55) / 3))
    assert 1 / found[2].cores_gb_per_s == pytest.approx(1 / 100 + (1 / 60 - 1 / 100) / 3)
    assert found[2].hand_off_s == pytest.approx(1e-4 + 2e-4 / 3)
    middle = concurrent_rates(four, work("int4", 20), 4)
    assert 1 / middle.cores_gb_per_s == pytest.approx(1 / 60 + (1 / 40 - 1 / 60) * 19 / 31)
    attention = CpuAttentionRate(format="bfloat16", heads=1, gb_per_s=80.0, alone_gb_per_s=100.0)
    attending = replace(four, cores=replace(four.cores, attention=(attention,)))
    beside = [concurrent_rates(attending, work("int4", 1, 1), gpus).attended for gpus in (1, 4)]
    assert beside == [pytest.approx((80.0, 100.0)), pytest.approx((80.0 * 60 / 100, 100.0))]


def test_rates_beside_links_that_were_not_measured_stay_within_host_memory():
    """The CPU reads 120 GB/s beside a link of 55."""
    two = concurrent_rates(links(2), work("int4", 32), 2)  # products are bound by operations: nobody has to wait
    assert (two.link_alone_gb_per_s, two.link_gb_per_s, two.cores_gb_per_s) == pytest.approx((110, 100, 50))
    four = concurrent_rates(links(4), work("int4", 1), 4)
    assert four.link_alone_gb_per_s == pytest.approx(120 + 55)
    assert four.link_gb_per_s + four.cores_gb_per_s == pytest.approx(175)
    asked = 50 * 175 / 55  # a link keeps 50 of 55 GB/s beside the CPU
    assert four.link_gb_per_s / four.cores_gb_per_s == pytest.approx(asked / 100), "both lose the same share"
    known = concurrent_rates(links(4, alone=200.0), work("int4", 1), 4)
    assert known.link_alone_gb_per_s == 200.0 and known.link_gb_per_s + known.cores_gb_per_s == pytest.approx(200)
    assert (four.cores_alone_gb_per_s, four.hand_off_s) == (110.0, 1e-4), "as beside one"
    by_pages = [links_gb_per_s(replace(MACHINE, cores=None), gpus) for gpus in (1, 3)]
    assert by_pages == [55.0, 165.0] and links_gb_per_s(replace(MACHINE, link_gb_per_s=None), 2) is None


@pytest.mark.parametrize(
    "gpus, links, alone, beside, cores",
    [
        ("2x24GiB", "", 50, 50 * 85 / 110, 60 * 85 / 110),  # host memory gives 25 + 60 GB/s
        ("4x24GiB", "", 85, 85 * 85 / 145, 60 * 85 / 145),
        ("2x24GiB", "links=30GB/s,", 30, 30 * 85 / 90, 60 * 85 / 90),
        ("4x24GiB", "links=95GB/s,", 95, 95 * 95 / 155, 60 * 95 / 155),
    ],
)
def test_several_links_of_an_assumed_machine(gpus, links, alone, beside, cores):
    found = parse_assumed(f"gpus={gpus},host=128GiB,link=25GB/s,{links}memory=1000GB/s,cores=60GB/s")
    both = concurrent_rates(found, work("int4", 1), len(found.gpus))
    assert (both.link_alone_gb_per_s, both.link_gb_per_s, both.cores_gb_per_s) == pytest.approx((alone, beside, cores))
    one = concurrent_rates(found, work("int4", 1))
    assert (one.link_gb_per_s, one.cores_gb_per_s) == (25, 60)


def test_what_several_links_gave_is_not_kept_for_other_links():
    """The rates beside one link change as that link does."""
    measured = links(4, rates("int4", 1, 60.0, link=120.0), alone=160.0)
    for line in ("link=110GB/s", "links=100GB/s", "gpus=2x24GiB"):
        found = parse_assumed(line, measured)
        faster = 2.0 if line.startswith("link=") else 1.0
        assert found.all_links_gb_per_s == (100.0 if "links" in line else None)
        assert [(each.gpus, each.link_gb_per_s) for each in found.cores.products] == [(1, 50.0 * faster)] * 3
    same = parse_assumed("gpus=4x24GiB,host=64GiB", measured)
    assert (same.all_links_gb_per_s, same.cores) == (160.0, measured.cores)
    with pytest.raises(UsageError, match="links: that is the rate of several GPUs' links together; give link="):
        parse_assumed("links=100GB/s", MACHINE)
    pair = typical_machines()["rtx4090"].profile(2)
    assert links_gb_per_s(pair, 2) == 2 * pair.link_gb_per_s, "each has a link; nothing says what host memory gives"


def test_a_file_from_before_several_links_were_measured_is_read(tmp_path):
    path = ROOT / "benchmarks" / "results" / "h100-readme" / "machine.json"
    found = read_profile(path)
    assert found.measured_with == 7 and found.all_links_gb_per_s is None
    assert {each.gpus for each in found.cores.products} == {1}
