"""The options of run_model.py, and how every command reads its line.

`run` declares them, `read` makes a RunConfig of them, `file` reads and writes them as YAML, `rows` lists them for the documentation.
"""

from zero_inference.options.parser import Parser, examples
from zero_inference.options.read import (
    STAND_INS,
    config_of,
    model_of,
    options_asked,
    run_config,
    without_file,
    words_of,
)
from zero_inference.options.rows import OptionRow, commands_of, examples_of, option_rows
from zero_inference.options.run import add_run_arguments

__all__ = [
    "OptionRow",
    "Parser",
    "STAND_INS",
    "add_run_arguments",
    "commands_of",
    "config_of",
    "examples",
    "examples_of",
    "model_of",
    "option_rows",
    "options_asked",
    "run_config",
    "without_file",
    "words_of",
]
