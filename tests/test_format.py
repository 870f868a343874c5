"""Bytes in words: GiB, and smaller units where these would be hard to read."""

import pytest

from zero_inference.utils.format import format_bytes, format_bytes_pair, format_gib, format_gib_rounded_up

GIB, MIB = 1 << 30, 1 << 20


@pytest.mark.parametrize(
    "nbytes, text",
    [
        (0, "0 bytes"),
        (7, "7 bytes"),
        (1024, "1 KiB"),
        (353 << 10, "0.345 MiB"),
        (100 * MIB, "100 MiB"),
        (512 * MIB, "0.5 GiB"),
        (20.44 * GIB, "20.4 GiB"),
        (131.417 * GIB, "131 GiB"),
        (999.6 * GIB, "1000 GiB"),
        (1511.9 * GIB, "1512 GiB"),
    ],
)
def test_an_amount_has_three_digits_and_its_unit(nbytes, text):
    assert format_bytes(nbytes) == text


def test_two_amounts_share_a_unit_and_differ_where_they_do():
    assert format_bytes_pair(20.44 * GIB, 23.5 * GIB) == ("20.4", "23.5", "GiB")
    assert format_bytes_pair(0, 128 * GIB) == ("0", "128", "GiB")
    assert format_bytes_pair(128.2 * GIB, 128 * GIB) == ("128.20", "128.00", "GiB")
    assert format_bytes_pair(10 * MIB, 20 * MIB) == ("10", "20", "MiB")
    assert format_bytes_pair(0, 0) == ("0", "0", "bytes")


def test_what_is_enough_is_rounded_up():
    assert format_gib_rounded_up(6.21 * GIB) == "6.3 GiB" and format_gib_rounded_up(131.401 * GIB) == "131.5 GiB"
    assert format_gib(7.25 * GIB) == "7.25"
