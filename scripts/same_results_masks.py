"""What a machine measures, in the output and the records of same_results.py: replaced by what stands for it."""

from __future__ import annotations

import re
from typing import Any

# Values of a record that are measured: only their kind (a number, a text, null) is compared, there and in all below.
MEASURED = re.compile(
    r".*(_s|_gbps|_tflops|_spread|_throughput)|seconds|timestamp|environment|peak_(gpu|host)_bytes"
    r"|load_average_before|usable_cores|slowest_step_at|slowest_step_over_median|gbps_while_busy|fraction_of_limit"
    r"|copied_bytes|ahead_bytes|link_ahead_bytes"  # how far the copies had got when a step began
    r"|bound_by|link_from"
)  # which of two measured rates was larger
# Of text: what is measured becomes "#". The words and all other numbers stay.
MASKS = tuple(
    (re.compile(pattern), mask)
    for pattern, mask in (
        (r"^[\d.]+% of (the limit|the \w+'s limit|the limit of [\w' ]+): .*", "#% of LIMIT"),
        (r"^(time to first token \(prefill\)|decode \(\d+ steps?\)|total)  .*", r"\1 #"),  # rows of the results' table
        (r"^((?:median of \d+ loops|1 loop)) {2,}seconds .*", r"\1"),  # its head: as wide as the figures below
        (r"\b\d+(\.\d+)?(?= ?(s|ms|us|token/s|GB/s|TFLOP/s|GiB free|GiB are there)\b)", "#"),
        (r"\b[\d.]+%(?= of (their median, so|the time))", "#%"),
        (r"(busy|planned:) [\d.]+", r"\1 #"),
        (r"(peak (?:gpu mem:|GPU|host)) [\d.]+", r"\1 #"),
        (r"\d{4}-\d\d-\d\d[T_ ]\d\d:\d\d:\d\d([.,:]\d+)?(\+\d\d:\d\d)?", "TIME"),
        (r"0x[0-9a-f]{6,}", "ADDRESS"),
        (r"(?i)\b((?:sub)?process(?:es)?|pids?) ?([:=] ?)?\d+", r"\1 PID"),
        (r"(master[_-]port[= ]|127\.0\.0\.1:|localhost:)\d+", r"\1PORT"),
    )
)
# Lines that come and go with the machine's speed and load.
PASSING = re.compile(
    r"loading [\d.]+ of |.*, token \d+/\d+$|loading weights: |generating: |importing |compiling or |decode step \d+ of loop"
    r"|warning: (the load average was|the decode times of)|-{20,}$"
    r"|.*\d(it/s|s/it)\b|.*DeepSpeed deepspeed\S* (built|compil)|.*Time to load \S+ op|USDT:.* profiler_"
)


def lines_of(text: str, in_any_order: bool = False) -> list[str]:
    """The lines of `text` with what is measured masked; those of several ranks sorted, and each kept once."""
    lines = [masked_text(line) for line in text.replace("\r", "\n").splitlines() if not PASSING.match(line)]
    return sorted(set(lines)) if in_any_order else lines


def masked_text(text: str) -> str:
    for pattern, mask in MASKS:
        text = pattern.sub(mask, text)
    return text


def masked_values(value: Any, measured: bool = False) -> Any:
    """`value` with what is measured replaced by its kind."""
    if isinstance(value, dict):
        return {key: masked_values(item, measured or bool(MEASURED.fullmatch(key))) for key, item in value.items()}
    if isinstance(value, list):
        return [masked_values(item, measured) for item in value]
    if measured and value is not None:
        return "a text" if isinstance(value, str) else "a flag" if isinstance(value, bool) else "a number"
    return masked_text(value) if isinstance(value, str) else value
