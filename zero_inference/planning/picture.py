"""The configurations that were compared as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from zero_inference.planning.candidates import Candidate
from zero_inference.planning.ranking import pareto_front
from zero_inference.utils.replace import replacing


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
    with replacing(path) as part:
        figure.savefig(part, format=path.suffix.lstrip(".").lower() or "png")
    pyplot.close(figure)
