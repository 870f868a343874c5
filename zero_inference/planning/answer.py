"""What `zero-inference plan` prints: the best configuration in a sentence, the table, what to know about it, and commands."""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path

from zero_inference.engines.base import Job
from zero_inference.errors import UsageError
from zero_inference.models.spec import checkpoint_refusal
from zero_inference.planning.choose import what_is_faster
from zero_inference.planning.explain import (
    commands,
    gpus_in_words,
    headline,
    in_json,
    notes,
    ranked_behind,
    rows_of,
    rows_without_times,
    table,
    what_does_not_fit,
    why_none,
    why_not_predicted,
    without_times_in_json,
)
from zero_inference.planning.search import Candidate, SearchResult, pareto_front, ranked, verify
from zero_inference.utils.files import write_atomically
from zero_inference.utils.tables import PIPED_WIDTH

COMMANDS = 3


def print_answer(
    args: argparse.Namespace, job: Job, found: SearchResult, say: Callable[[str], None], shown_rows: int
) -> None:
    """Prints it. Raises UsageError where nothing fits, or where nothing is predicted and that was to be drawn or tried."""
    if not found.candidates and (not found.unknown or args.verify or args.plot):
        raise UsageError(why_none(found, args.model))
    best = ranked(found.candidates, args.goal)
    if args.verify:
        best = verify(best, args.verify, args.goal, say)
    if args.plot is not None:
        draw(best, args.plot, f"{args.model}, prompt {args.prompt_len}, {args.gen_len} new tokens: predicted")
        say(f"picture: {args.plot}")
    if args.json:
        print(_in_json(args, job, found, best))
        return
    width = shutil.get_terminal_size((PIPED_WIDTH, 24)).columns
    most = None if args.all else shown_rows
    shown, unknown = best[:most], [] if best and not args.all else found.unknown[:most]
    for line in (_first_line(args, found, best), _about(args, job)):
        print(textwrap.fill(line, width, break_on_hyphens=False, break_long_words=False))
    print()
    rows = [*rows_of(shown, best), *rows_without_times(unknown, len(shown) + 1)]
    print(table(rows, shown, args.all, unknown), end="")
    for line in _below(args, found, best, len(shown), len(unknown)):
        print(textwrap.fill(line, width, subsequent_indent="    ", break_on_hyphens=False, break_long_words=False))
    print()
    good = [(place, each.plan) for place, each in enumerate(shown, 1) if not each.failed] or list(enumerate(unknown, 1))
    print("\n".join(commands(good[:COMMANDS], _where(args))))
    print(f"For the details of one, add {' '.join(filter(None, ('--dry-run', _where(args))))}.", flush=True)


def _first_line(args: argparse.Namespace, found: SearchResult, best: Sequence[Candidate]) -> str:
    return headline(best, args.goal) if best else why_none(found, args.model)


def _about(args: argparse.Namespace, job: Job) -> str:
    """The work and the machine that all rows are for."""
    description = job.machine.profile()
    limits = {"device": args.max_gpu_memory, "host": args.max_host_memory}
    used = " and ".join(f"{gib:g} GiB of {where} memory" for where, gib in limits.items() if gib is not None)
    line = f"Prompt {args.prompt_len}, {args.gen_len} new tokens"
    line += f"; on {description.in_words()}" if description is not None else ""
    line += f"; at most {used} used" if used else ""
    caveat = None if description is None else description.caveat()
    return f"{line}{f'; {caveat}' if caveat else ''}."


def _below(
    args: argparse.Namespace, found: SearchResult, best: Sequence[Candidate], shown: int, unknown: int
) -> list[str]:
    """Return the lines below a table of the `shown` best and of `unknown` configurations that are not predicted."""
    hidden = len(best) - shown if best else len(found.unknown) - unknown
    lines = [f"{hidden} more configuration{'s fit' if hidden > 1 else ' fits'}: --all shows them"] if hidden else []
    if best:
        lines += [
            "*: no other has both a shorter step and more token/s",
            *notes(best[:shown]),
            *ranked_behind(best, args.goal),
        ]
        lines += filter(None, (what_is_faster(best, args.goal), None if args.num_gpus else gpus_in_words(best)))
    lines += filter(None, [checkpoint_refusal(args.model, args.dummy)])
    if found.too_large:
        lines += ["Does not fit:", *(f"  {line}" for line in what_does_not_fit(found.too_large))]
    if found.unknown and best:
        where = "" if unknown else "; --all lists them"
        lines.append(f"fit, but not predicted: {len(found.unknown)} more: {why_not_predicted(found.unknown)}{where}")
    return lines


def _where(args: argparse.Namespace) -> str:
    """The options that name the machine."""
    return " ".join(
        f"--{name} {shlex.quote(value)}" for name in ("machine", "assume") if (value := getattr(args, name))
    )


def _in_json(args: argparse.Namespace, job: Job, found: SearchResult, best: Sequence[Candidate]) -> str:
    description = job.machine.profile()
    names = ("model", "goal", "prompt_len", "gen_len", "max_gpu_memory", "max_host_memory")
    return json.dumps(
        {name: getattr(args, name) for name in names}
        | {
            "verdict": _first_line(args, found, best),
            "machine": None if description is None else description.in_words(),
            "machine_source": None if description is None else description.source,
            "configurations": in_json(rows_of(best, best), best),
            "too_large": what_does_not_fit(found.too_large),
            "not_predicted": {
                "count": len(found.unknown),
                "because": why_not_predicted(found.unknown) or None,
                "configurations": without_times_in_json(found.unknown, len(best) + 1),
            },
            "checkpoint_refused": checkpoint_refusal(args.model, args.dummy),
        },
        indent=1,
    )


def draw(candidates: Sequence[Candidate], path: Path, title: str) -> None:
    """A picture of latency against throughput, PNG, PDF or SVG by the name. Raises OSError, or ValueError for another kind of file."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 6))
    kinds: dict[str, list[Candidate]] = {}
    for each in candidates:
        gpus = f", {each.world_size} GPUs" if each.world_size > 1 else ""
        kinds.setdefault(f"{each.config.engine}, {each.config.quant_bits} bits{gpus}", []).append(each)
    for kind, some in kinds.items():
        axes.scatter(
            [1e3 * each.times.step.seconds for each in some],
            [each.tokens_per_s for each in some],
            label=kind,
            s=28,
        )
    front = pareto_front(candidates)
    steps = [1e3 * each.times.step.seconds for each in front]
    axes.plot(steps, [each.tokens_per_s for each in front], color="black", linewidth=1, label="Pareto front")
    for each, step in zip(front, steps):
        axes.annotate(
            f"batch {each.config.batch_size}",
            (step, each.tokens_per_s),
            xytext=(4, 4),
            textcoords="offset points",
            fontsize=8,
        )
    axes.set(xscale="log", yscale="log", xlabel="ms a step (latency of a token)", ylabel="token/s", title=title)
    axes.grid(True, which="both", alpha=0.2)
    axes.legend(fontsize=8)
    figure.tight_layout()
    with write_atomically(path) as part:
        figure.savefig(part, format=path.suffix.lstrip(".").lower() or "png")
    pyplot.close(figure)
