"""Commands and Python of README and docs: read from the pages, checked by the parsers that they would meet, and run.

A block of `sh` holds commands, one a line, continued after a backslash. A comment in the line above the block says what tests do:

    (none)                       each command is run on the CPU, in a folder of its page
    <!-- gpu: FOLDER -->         needs a GPU; benchmarks/results/FOLDER is where it was run
    <!-- hub: WHY -->            needs the model hub or a checkpoint
    <!-- tested: FILE, WHAT -->  takes long, and the like is run by this file of tests
    <!-- setup: WHY -->          installs something or changes the machine

All but the first are checked and not run. `python` blocks take the same comments.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import io
import os
import re
import runpy
import shlex
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from unittest import mock

import tomllib
from conftest import ROOT, without_gpus

BLOCK = re.compile(
    r"(?:^ *<!-- (?P<kind>gpu|hub|tested|setup): (?P<detail>.*?) -->\n)?"
    r"^(?P<indent> *)```(?P<language>sh|python)\n(?P<text>.*?)^(?P=indent)```$",
    re.DOTALL | re.MULTILINE,
)
LINKED = (
    "run_model.py",
    "examples",
    "scripts",
    "benchmarks",
    "docs",
)  # what commands name as if they stood in a checkout
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
INPUTS = "--prompts", "--ds-config", "--config", "--quality-data"  # files that a reader has


@dataclass(frozen=True, eq=False)
class Step:
    """A command of an `sh` block, or a `python` block, whose `words` are empty."""

    page: str
    line: int  # of the block
    kind: str  # "" is run
    detail: str
    text: str
    words: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {self.text.splitlines()[0]}"


def read_pages() -> dict[str, str]:
    """Return README.md and docs/*.md by their names."""
    files = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    return {str(file.relative_to(ROOT)): file.read_text(encoding="utf-8") for file in files}


def steps_of(page: str, text: str) -> list[Step]:
    found = []
    for block in BLOCK.finditer(text):
        place = page, text.count("\n", 0, block.start()) + 1, block["kind"] or "", block["detail"] or ""
        inside = re.sub(rf"^{block['indent']}", "", block["text"], flags=re.MULTILINE)
        if block["language"] == "python":
            found.append(Step(*place, inside))
            continue
        for line in inside.replace("\\\n", " ").splitlines():
            if words := shlex.split(line, comments=True):
                found.append(Step(*place, " ".join(line.split()), tuple(words)))
    return found


def what_is_wrong(step: Step) -> str | None:
    """Return why a program, an option, a value, a file or a name does not exist; starts and loads nothing."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
            _check(step)
    except SystemExit as end:  # of a parser
        return said.getvalue().strip() if end.code else None
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def _check(step: Step) -> None:
    named = re.split(r"[ ,;:]", step.detail)[0]
    if step.kind == "gpu":
        _need_file(f"benchmarks/results/{named}")
    elif step.kind == "tested":
        _need_file(named)
    if not step.words:
        _check_python(step)
    elif step.kind == "setup":
        _check_setup(step)
    else:
        _check_command(list(step.words))


def _need_file(name: str) -> Path:
    if not (ROOT / name).exists():
        raise FileNotFoundError(name)
    return ROOT / name


def _check_python(step: Step) -> None:
    for node in ast.walk(ast.parse(step.text)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("zero_inference"):
            module = importlib.import_module(node.module)
            for alias in node.names:
                getattr(module, alias.name)


def _check_setup(step: Step) -> None:
    if step.words[0] == "make":
        makefile = (ROOT / "Makefile").read_text()
        missing = [each for each in step.words[1:] if "=" not in each and f"\n{each}:" not in makefile]
        assert not missing, f"the Makefile has no target {missing}"
    for names in re.findall(r"(?:zero-inference|\.)\[([\w,-]+)\]", step.text):
        assert set(names.split(",")) <= set(EXTRAS), f"an extra of {names} does not exist"
    for word in step.words:
        if word.startswith(("scripts/", "docker/")):
            _need_file(word)


def _check_command(words: list[str]) -> None:
    _make_inputs(words)
    if words[0] in ("deepspeed", "torchrun"):
        words = _launched(words)
    elif words[0] in ("python", "python3"):
        words = words[1:]
    if words[0] == "zero-inference":
        _check_console(words[1:])
    elif words[0] == "run_model.py":
        from zero_inference.cli import run_parser
        from zero_inference.config.run_config import config_from_args

        config_from_args(run_parser().parse_args(words[1:]))
    else:
        known = _options_of_script(_need_file(words[0]))
        for name in (word.partition("=")[0] for word in words[1:] if word.startswith("--")):
            assert name in known, f"{words[0]} has no option {name}"


def _check_console(options: list[str]) -> None:
    from zero_inference.architectures import command as compare
    from zero_inference.architectures.command import read_arms
    from zero_inference.cli import console_parser
    from zero_inference.config.run_config import config_from_args, parse_options

    own, after = compare.split(options)
    args = console_parser(["zero-inference", *options], after).parse_args(own)
    if args.command == "run":
        config_from_args(args)
    if args.command == "compare":
        read_arms(args.model, args.arm, after, parse_options)


def _make_inputs(words: list[str]) -> None:
    """Make the files that options read, in the current folder: only the options themselves are checked."""
    words = [part for word in words for part in (shlex.split(word) if " --" in word else [word])]  # arms of compare
    for option, value in zip(words, words[1:]):
        file = Path(value)
        if option in INPUTS and not file.exists():
            (file.parent if file.suffix else file).mkdir(parents=True, exist_ok=True)
            if file.suffix:
                file.write_text("{}\n")


def _launched(words: list[str]) -> list[str]:
    """Return the script that a launcher starts, and the script's options, by the launcher's own parser."""
    if words[0] == "deepspeed":
        from deepspeed.launcher.runner import parse_args

        args = parse_args(words[1:])
        return [args.user_script, *args.user_args]
    from torch.distributed.run import get_args_parser

    args = get_args_parser().parse_args(words[1:])
    return [args.training_script, *args.training_script_args]


@cache
def _options_of_script(file: Path) -> str:
    """Return a text that names the options of a script: its --help, or its source if it is one of the shell."""
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".sh" and "sweep.py" in text:
        file = ROOT / "scripts" / "sweep.py"
    elif file.suffix == ".sh":
        return text
    return subprocess.run([sys.executable, str(file), "--help"], cwd=ROOT, capture_output=True, text=True).stdout


def run_steps(steps: list[Step], folder: Path) -> None:
    """Run the steps of one page in their order, in `folder`, as if it were a checkout; launchers' commands in this process, as one rank."""
    for name in LINKED:
        (folder / name).symlink_to(ROOT / name)
    names: dict[str, object] = {"__name__": "__main__"}  # what the page's Python has defined
    with contextlib.chdir(folder):
        for step in steps:
            if not step.words:
                exec(compile(step.text, str(step), "exec"), names)
            else:
                code = _run_command(list(step.words))
                assert code == 0, f"{step} ended with exit code {code}"


def _run_command(words: list[str]) -> int:
    from zero_inference.cli import console_main, main

    if words[0] in ("deepspeed", "torchrun"):
        words = _launched(words)
    elif words[0] == "python":
        words = words[1:]
    try:
        if words[0] == "zero-inference":
            return console_main(words)
        if words[0] == "run_model.py":
            return main(words)
        if not words[0].endswith(".py"):
            return subprocess.run(words, env=without_gpus() | {"PYTHON": sys.executable}).returncode
        with mock.patch.object(sys, "argv", words), mock.patch.object(sys, "path", [os.getcwd(), *sys.path]):
            runpy.run_path(words[0], run_name="__main__")
        return 0
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
