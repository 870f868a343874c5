"""The parser of every command: one-line errors with suggestions, help with examples, and what options of other tools are called here."""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
from collections.abc import Iterable, Sequence
from importlib import metadata
from typing import Any, NoReturn

from zero_inference.config.option import not_among
from zero_inference.errors import UsageError
from zero_inference.utils.format import did_you_mean, printable

LIBRARIES = ("torch", "transformers", "deepspeed", "accelerate")
MODEL_GIVEN = "model_given"  # dest of the positional model
# Messages of argparse, and what is printed instead.
_REWORDED = (
    (re.compile(r"argument (\S+): expected (?:one|at least one) argument"), r"\1 needs a value"),
    (re.compile(r"argument (?:-\w/)?(\S+): ignored explicit argument .*"), r"\1 takes no value"),
    (re.compile(r"argument (\S+): invalid (\S+) value: '(.*)'", re.DOTALL), r"\1 \3: no valid \2"),
)
# Our option -> options of llama.cpp, vLLM, transformers, DeepSpeed and accelerate, without dashes; `option=value` where the value decides.
OTHER_OPTIONS = {
    "--gen-len G": "n n-predict max-new-tokens max-tokens output-len",
    "--prompt-len P": "input-len n-prompt",
    "--prompt-len P and --gen-len G, whose sum is the context": "c ctx-size max-length max-model-len seq-len",
    "--prompt TEXT": "p",
    "--prompts FILE": "f file dataset",
    "--model NAME": "m hf-repo model-name-or-path model-path",
    "--gpu-memory GIB with --engine stream": "ngl n-gpu-layers gpu-memory-utilization max-memory vram",
    "--max-gpu-memory GIB": "ngl n-gpu-layers gpu-memory-utilization max-memory vram",
    "--engine stream, whose experts in host memory are multiplied by the CPU": "cpu-moe n-cpu-moe",
    "--cpu-threads N": "t threads num-threads",
    "--batch-size B": "b batch max-num-seqs parallel",
    "--num-gpus N": "tp tensor-parallel-size gpus",
    "--cpu-offload": "offload=cpu cpu-offload-gb swap-space",
    "--disk-offload": "offload=disk offload=nvme nvme",
    "--cpu-offload or --disk-offload": "offload offload-device",
    "--offload-dir DIR": "nvme-path offload-folder",
    "--kv-offload": "nkvo",
    "--quant-bits 8 or 4": "quantization quantize bits wbits",
    "--quant-bits 4": "load-in-4bit",
    "--quant-bits 8": "load-in-8bit",
    "--dtype float16": "fp16 half",
    "--dtype bfloat16": "bf16",
    "--dummy": "load-format",
    "--decode-graph off": "enforce-eager",
    "--engine accelerate": "device-map",
    "--temperature T": "temp",
    "--loops N": "r repetitions num-iters",
    "--rounds N": "r repetitions num-iters",
    "--log-file FILE": "o output output-file output-json",
    "--verbose 2": "v debug",
    "--quality TASKS": "tasks",
    "--quality-limit N": "limit",
    "--machine NAME": "gpu hardware",
}
NOT_DONE = {  # the answer -> options that no command has
    "runs have --temperature and --top-p; from Python `load` gives a model whose `generate` has more": "top-k min-p num-beams",
    "CUDA_VISIBLE_DEVICES says which GPUs are used": "device main-gpu",
    "HF_TOKEN in the environment has it": "hf-token token",
    "the newest commit is fetched; for another one give a local folder": "revision",
}
OTHER_COMMANDS = {
    "search": "plan",
    "bandwidth": "link",
    **dict.fromkeys(("generate", "bench", "benchmark", "chat"), "run"),
}


class Formatter(argparse.HelpFormatter):
    """Wraps prose to the width of the terminal, and not the indented lines, which are examples."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)  # names of options stay whole

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        lines = re.sub(r"(?<=\S)\n(?=\S)", " ", text.strip("\n")).splitlines()
        wrapped = (line if line.startswith("  ") else textwrap.fill(line, width - len(indent)) for line in lines)
        return textwrap.indent("\n".join(wrapped), indent)


class Parser(argparse.ArgumentParser):
    """Accepts `_` for `-` in option names and no abbreviations, and reports bad usage in one line with exit code 2."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"formatter_class": Formatter, "allow_abbrev": False, **kwargs})

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """Refuse unknown words here, in the parser of the subcommand, which knows what was probably meant."""
        words = [_hyphenated(word) for word in (sys.argv[1:] if args is None else args)]
        try:
            found, unknown = super().parse_known_args(words, namespace)
        except UsageError as error:  # of Option.read
            self.error(str(error).removesuffix("."))
        if unknown:
            self.error(self._about_unknown(unknown, words))
        return found, []

    def _get_value(self, action: argparse.Action, text: str) -> Any:
        try:
            return super()._get_value(action, text)
        except UsageError as error:
            if action.nargs != "+" or not re.search("[A-Za-z].*[-/]", text):
                raise
            # an option of several values takes the model after it
            raise UsageError(f"{str(error).removesuffix('.')}; if {text} is the model, write it first.") from None

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {printable(reword(message))}\n")

    def option_names(self) -> list[str]:
        """Return the long names of all options that the help shows."""
        shown = [action for action in self._actions if action.help != argparse.SUPPRESS]
        return [name for action in shown for name in action.option_strings if name.startswith("--")]

    def _about_unknown(self, unknown: Sequence[str], words: Sequence[str]) -> str:
        word = next((word for word in unknown if word.startswith("-")), None)
        if word is None:
            return f"unexpected argument {unknown[0]}"
        option, equals, value = word.partition("=")
        if not equals:  # its value may have been taken for the model
            value = next(iter(words[words.index(word) + 1 :]), "")
        bare = [name[2:] for name in self.option_names()]  # dashes alike in both would count as likeness
        near = did_you_mean(option.lstrip("-"), bare).replace("did you mean ", "did you mean --")
        advice = other_option(option.lstrip("-"), value, self.option_names()) or near or f"see {self.prog} --help"
        return f"there is no option {option}; {advice}"

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        name = action.option_strings[-1] if action.option_strings else "command"
        message = not_among(name, value, tuple(action.choices)).removesuffix(".")
        if (other := OTHER_COMMANDS.get(str(value))) in action.choices:
            message = f"there is no command {value}; use {other}"
        raise argparse.ArgumentError(None, message)


def other_option(name: str, value: str, known: Iterable[str]) -> str | None:
    """Return what to type instead of an option of another tool, as the end of a sentence; None for an unknown name.

    Args:
        name: without the dashes.
        value: its value, or "".
        known: the options of the command, with their dashes.
    """
    known, spellings = set(known), {name, f"{name}={value.lower()}"}
    for advice, theirs in OTHER_OPTIONS.items():
        if spellings & set(theirs.split()) and advice.partition(" ")[0].rstrip(",") in known:
            return f"use {advice}"
    return next((answer for answer, theirs in NOT_DONE.items() if name in theirs.split()), None)


def reword(message: str) -> str:
    """Return argparse's message in this package's words."""
    for pattern, words in _REWORDED:
        message = pattern.sub(words, message)
    return message.removeprefix("argument ")


def _hyphenated(word: str) -> str:
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value if name.startswith("--") else word


def examples(*lines: str) -> str:
    """Return the help text that shows `lines` as they are typed."""
    return "\n".join(["Example:" if len(lines) == 1 else "Examples:", *(f"  {line}" for line in lines)])


def add_verbose(parser: argparse._ActionsContainer) -> None:
    """Add --verbose to a command that is not a run."""
    words = "0: no progress and no warnings; 2: a traceback with an error (default: 1)"
    parser.add_argument("--verbose", type=int, choices=(0, 1, 2), default=1, help=words)


class Version(argparse.Action):
    """Print the versions of this package and of its libraries, without importing these."""

    def __init__(self, option_strings: Any, dest: str, **_: Any) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, 0, default=argparse.SUPPRESS, help="show versions and exit")

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        own = sys.modules[__name__.partition(".")[0]].__version__  # of the code that runs, installed or not
        print(f"zero-inference {own} ({', '.join(f'{name} {_version(name)}' for name in LIBRARIES)})")
        parser.exit()


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"
