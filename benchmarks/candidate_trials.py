"""What plan_candidates.py tried of the candidates of each plan, what is to be tried next, and what follows from it."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

from zero_inference.utils.format import decimals, format_percent, significant
from zero_inference.utils.tables import Column

WITHIN, SLOWER = 0.95, 0.5  # of the best: what is good enough; what is so slow that it needs no exact time
MANY_TOKENS, FEW_TOKENS = 17, 5
SETTLING_TOKENS, SETTLING_STEPS = 8, 25  # of the stream engine: from how many tokens on it settles, and its most steps
START_S, LOAD_BYTES_PER_S = 15, 8e9
ALL = "all"

Pair = tuple[str, float | str]  # model, and GiB of device memory or ALL that is free
Result = dict[str, Any]  # tokens, measured_tokens_per_s, failed (why), log


@dataclass(frozen=True)
class Candidate:
    """`row` is that of `zero-inference plan --json`, `predicted` in token/s."""

    command: str
    predicted: float
    row: dict[str, Any]

    def in_words(self) -> str:
        row = self.row
        gpus = f", {row['gpus']} GPUs" if row["gpus"] > 1 else ""
        places = f"weights in {row['weights']}, keys in {row['keys_and_values']}"
        return f"{row['place']}: {row['engine']}, {row['quant_bits']} bits{gpus}, {places}"


@dataclass
class Trials:
    """What was tried of the candidates of `pairs`, and what is still to be; `results` by command."""

    pairs: dict[Pair, list[Candidate]]
    results: dict[str, Result]
    gen_len: int

    def measured(self, candidate: Candidate) -> float | None:
        return self.results.get(candidate.command, {}).get("measured_tokens_per_s")

    def due(self) -> list[Candidate]:
        """One for each command that is to be tried, in turn: every pair's first place, every pair's second one and so on."""
        found: dict[str, Candidate] = {}
        for each in sorted(itertools.chain(*self.pairs.values()), key=lambda each: each.row["place"]):  # stable
            if self.is_due(each.command):
                found.setdefault(each.command, each)
        return list(found.values())

    def is_due(self, command: str) -> bool:
        result = self.results.get(command)
        return result is None or (result["failed"] is None and result["tokens"] < self.tokens_of(command))

    def tokens_of(self, command: str) -> int:
        """Few where the command is far behind the best of each of its pairs, as predicted, and as measured if it was."""
        for members in self.pairs.values():
            predicted = max(each.predicted for each in members)
            measured = max(self.measured(each) or 0.0 for each in members)
            for each in members:
                close = each.predicted >= SLOWER * predicted or 0 < SLOWER * measured <= (self.measured(each) or 0.0)
                if each.command == command and close:
                    return min(self.gen_len, MANY_TOKENS)
        return min(self.gen_len, FEW_TOKENS)

    def estimate_s(self, candidate: Candidate) -> float:
        row, tokens = candidate.row, self.tokens_of(candidate.command)
        settling = SETTLING_STEPS if row["engine"] == "stream" and tokens >= SETTLING_TOKENS else 0
        load_s = (row["host_bytes"] + (row["device_bytes"] or 0)) / LOAD_BYTES_PER_S
        return START_S + load_s + 2 * row["prefill_s"] + (2 * (tokens - 1) + settling) * row["step_s"]

    def verdicts(self) -> list[dict[str, Any]]:
        """By COLUMNS, a row for each pair, and whether the plan's best is good enough for sure."""
        rows = []
        for (model, gib), members in self.pairs.items():
            first, best = members[0], max(members, key=lambda each: self.measured(each) or 0.0)
            rate, best_rate = self.measured(first), self.measured(best)
            done = sum(not self.is_due(each.command) for each in members)
            ratio = rate / best_rate if rate and best_rate else None
            row: dict[str, Any] = dict(model=model, gpu_memory=gib, first=first.in_words(), predicted=first.predicted)
            row |= dict(measured=rate, best_measured=best_rate, best=best_rate and best.in_words(), ratio=ratio)
            row |= dict(tried=f"{done} of {len(members)}", holds=done == len(members) and (ratio or 0.0) >= WITHIN)
            rows.append(row)
        return rows

    def rows(self) -> list[dict[str, Any]]:
        """By ALL_COLUMNS, a row for each candidate."""
        nothing = dict.fromkeys(("tokens", "measured_tokens_per_s", "failed", "log"))
        return [
            {"model": model, "gpu_memory": gib, "place": each.row["place"], "configuration": each.in_words()}
            | {"command": each.command, "predicted_tokens_per_s": each.predicted}
            | {name: each.row.get(name) for name in ("prefill_s", "device_bytes", "host_bytes", "bound_by")}
            | (nothing | self.results.get(each.command, {}))
            for (model, gib), members in self.pairs.items()
            for each in members
        ]


COLUMNS = (
    Column("model", "model", dtype="string"),
    Column("gpu_memory", "GiB", dtype="string"),
    Column("first", "plan's best", dtype="string"),
    Column("predicted", "predicted (token/s)", significant),
    Column("measured", "measured", significant),
    Column("best_measured", "best measured", significant),
    Column("best", "of", dtype="string"),
    Column("ratio", "plan's of the best", format_percent),
    Column("tried", "tried", dtype="string"),
)
ALL_COLUMNS = (
    *COLUMNS[:2],
    Column("configuration", "configuration", dtype="string"),
    Column("predicted_tokens_per_s", "predicted (token/s)", significant),
    Column("measured_tokens_per_s", "measured", significant),
    Column("tokens", "tokens", decimals(0), "Int64"),
    Column("failed", "failed", dtype="string"),
)
