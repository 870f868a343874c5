"""Scoring the loaded model of a run."""

from __future__ import annotations

from zero_inference.engines.base import Job, LoadedModel
from zero_inference.quality import evaluate as quality
from zero_inference.records.schema import Quality
from zero_inference.records.scores import Tasks
from zero_inference.records.write import RunLog
from zero_inference.utils.progress import Progress


def score_run(
    job: Job, loaded: LoadedModel, questions: dict[str, list[dict]], tokenizer, files: RunLog, progress: Progress
) -> Quality:
    """The scores of each task, with their errors; writes the items where --quality-items asks for them. All ranks call it."""
    config, ranks = job.config, job.ranks
    settings = quality.settings_of(config, ranks)
    evaluation = quality.evaluate(questions, loaded.model, tokenizer, loaded.device, ranks, settings, progress)
    for task, scores in evaluation.scores.items():
        if scores["truncated"]:
            progress.say(
                f"warning: {task}: {scores['truncated']} sequences were longer than the model's context; "
                "their beginnings were cut off"
            )
    if config.quality_items and ranks.is_first:
        with files.noting("items", config.quality_items):
            quality.write_items(config.quality_items, evaluation.items)
    return Quality(by_task=Tasks.model_validate(evaluation.scores))
