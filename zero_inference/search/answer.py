"""What `zero-inference plan` prints: the best configuration in a sentence, the table, what to know about it, and commands."""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import textwrap
from collections.abc import Callable, Sequence

from zero_inference.engines.base import Job
from zero_inference.errors import UsageError
from zero_inference.runtime.tables import PIPED_WIDTH
from zero_inference.search.arguments import SHOWN
from zero_inference.search.candidates import Candidate, Found
from zero_inference.search.choose import what_is_faster
from zero_inference.search.picture import draw
from zero_inference.search.ranking import ranked
from zero_inference.search.table import in_json, rows_of, table
from zero_inference.search.verify import verified
from zero_inference.search.words import (
    commands,
    headline,
    notes,
    ranked_behind,
    what_does_not_fit,
    why_none,
    why_not_predicted,
)

COMMANDS = 3


def answer(args: argparse.Namespace, job: Job, found: Found, say: Callable[[str], None]) -> None:
    """Prints it. Raises UsageError where nothing fits, or nothing can be predicted."""
    if not found.candidates:
        raise UsageError(why_none(found, args.model))
    best = ranked(found.candidates, args.goal)
    if args.verify:
        best = verified(best, args.verify, args.goal, say)
    if args.plot is not None:
        draw(best, args.plot, f"{args.model}, prompt {args.prompt_len}, {args.gen_len} new tokens: predicted")
        say(f"picture: {args.plot}")
    if args.json:
        print(_in_json(args, job, found, best))
        return
    width = shutil.get_terminal_size((PIPED_WIDTH, 24)).columns
    shown = best if args.all else best[:SHOWN]
    for line in (headline(best, args.goal), _about(args, job)):
        print(textwrap.fill(line, width, break_on_hyphens=False, break_long_words=False))
    print()
    print(table(rows_of(shown, best), shown, args.all), end="")
    for line in _below(found, best, shown, args.goal):
        print(textwrap.fill(line, width, subsequent_indent="    ", break_on_hyphens=False, break_long_words=False))
    print()
    print("\n".join(commands(shown, COMMANDS)))
    print(f"For the details of one, add {_more(args)}.", flush=True)


def _about(args: argparse.Namespace, job: Job) -> str:
    """The work and the machine that all rows are for."""
    description = job.machine.described()
    limits = {"device": args.max_gpu_memory, "host": args.max_host_memory}
    used = " and ".join(f"{gib:g} GiB of {where} memory" for where, gib in limits.items() if gib is not None)
    line = f"Prompt {args.prompt_len}, {args.gen_len} new tokens"
    line += f"; on {description.in_words()}" if description is not None else ""
    line += f"; at most {used} used" if used else ""
    caveat = None if description is None else description.caveat()
    return f"{line}{f'; {caveat}' if caveat else ''}."


def _below(found: Found, best: Sequence[Candidate], shown: Sequence[Candidate], goal: str) -> list[str]:
    more = [f"{len(best) - len(shown)} more configurations fit: --all shows them"] if len(best) > len(shown) else []
    lines = [*more, "*: no other has both a shorter step and more token/s", *notes(shown), *ranked_behind(best, goal)]
    lines += [line] if (line := what_is_faster(best, goal)) else []
    if found.too_large:
        lines += ["Does not fit:", *(f"  {line}" for line in what_does_not_fit(found.too_large))]
    if found.unknown:
        lines.append(f"{len(found.unknown)} more fit, but are not predicted: {why_not_predicted(found.unknown)}")
    return lines


def _more(args: argparse.Namespace) -> str:
    """What to add to a command to have its plan for the same machine."""
    where = [f"--{name} {shlex.quote(value)}" for name in ("machine", "assume") if (value := getattr(args, name))]
    return " ".join(["--dry-run", *where])


def _in_json(args: argparse.Namespace, job: Job, found: Found, best: Sequence[Candidate]) -> str:
    description = job.machine.described()
    names = ("model", "goal", "prompt_len", "gen_len", "max_gpu_memory", "max_host_memory")
    return json.dumps(
        {name: getattr(args, name) for name in names}
        | {
            "verdict": headline(best, args.goal),
            "machine": None if description is None else description.in_words(),
            "machine_source": None if description is None else description.source,
            "configurations": in_json(rows_of(best, best), best),
            "too_large": what_does_not_fit(found.too_large),
            "not_predicted": {"count": len(found.unknown), "because": why_not_predicted(found.unknown) or None},
        },
        indent=1,
    )
