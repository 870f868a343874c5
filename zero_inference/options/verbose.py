"""`--verbose` of commands that are not runs."""

from __future__ import annotations

import argparse


def add_verbose(parser: argparse._ActionsContainer) -> None:
    """`--verbose` of a command."""
    parser.add_argument(
        "--verbose",
        type=int,
        choices=(0, 1, 2),
        default=1,
        help="0: no progress and no warnings; 2: a traceback with an error (default: 1)",
    )
