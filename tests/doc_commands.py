"""What tests do with the commands of README and docs: check them by the parsers that they would meet, and run them."""

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
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

from conftest import ROOT, without_gpus
from doc_blocks import Block, Command

from zero_inference.errors import UsageError

RESULTS = ROOT / "benchmarks" / "results"
LINKED = (
    "run_model.py",
    "examples",
    "scripts",
    "benchmarks",
    "docs",
)  # what commands name as if they stood in a checkout
# Programs that change the machine, or fetch: allowed in blocks of setup, and there alone.
SETUP = (
    "apt",
    "apt-get",
    "cd",
    "docker",
    "export",
    "git",
    "hf",
    "make",
    "pip",
    "pip3",
    "source",
    "sudo",
    "ulimit",
    "wsl",
)
SETUP_MODULES = ("build", "http.server", "mkdocs", "pip", "pytest", "venv")
INPUTS = ("--prompts", "--ds-config", "--config", "--quality-data")
LAUNCHERS = ("deepspeed", "torchrun")


def check(command: Command) -> None:
    """Raises WrongDocs for a program, an option, a value or a file that is not there; starts and loads nothing."""
    kind, detail = command.block.kind, command.block.detail
    if kind == "gpu" and not (RESULTS / detail.split()[0].rstrip(",;:")).is_dir():
        raise command.wrong(f"benchmarks/results/{detail.split()[0]} is not there")
    if kind == "tested" and not (ROOT / detail.split()[0].rstrip(",;:")).is_file():
        raise command.wrong(f"{detail.split()[0]} is not there")
    if kind == "exits" and not detail.split()[0].isdigit():
        raise command.wrong(f"{detail}: which exit code?")
    _make_inputs(command.words)
    with _usage_errors(command):
        if kind == "setup":
            _check_setup(command)
        else:
            _check_program(command, list(command.words))


@contextlib.contextmanager
def _usage_errors(command: Command) -> Iterator[None]:
    """Of a parser that would end the process, and of the configuration."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
            yield
    except UsageError as error:
        raise command.wrong(str(error)) from None
    except SystemExit as end:
        if end.code:
            raise command.wrong((said.getvalue().strip().splitlines() or [str(end)])[-1]) from None


def _check_program(command: Command, words: list[str]) -> None:
    program, rest = words[0], words[1:]
    if program in ("python", "python3"):
        if rest[:2] == ["-m", "zero_inference"]:
            return _check_console(rest[2:])
        if not rest or rest[0].startswith("-"):
            raise command.wrong(
                f"{program} is given a file, or -m zero_inference; other modules belong to <!-- setup: ... -->"
            )
        return _check_file(command, rest[0], rest[1:])
    if program in LAUNCHERS:
        script, options = _launched(command, program, rest)
        return _check_file(command, script, options)
    if program == "zero-inference":
        return _check_console(rest)
    if "/" in program:
        return _check_file(command, program, rest)
    raise command.wrong(
        f"{program} is no program that is known here; what installs or fetches belongs to <!-- setup: ... -->"
    )


def _check_console(options: list[str]) -> None:
    from zero_inference.architectures import command as compare
    from zero_inference.architectures.arms import read_arms
    from zero_inference.cli import console_parser
    from zero_inference.config.run_options import config_from_args, parse_options

    own, after = compare.split(options)
    args = console_parser(["zero-inference", *options], after).parse_args(own)
    if args.command == "run":
        config_from_args(args)
    if args.command == "compare":
        read_arms(args.model, args.arm, after, parse_options)


def _make_inputs(words: Sequence[str]) -> None:
    """Files that the reader has: what is wrong with the options is looked for, and not whether these are there."""
    words = [
        part for word in words for part in (shlex.split(word) if " --" in word else [word])
    ]  # an arm of compare is one word
    for option, value in zip(words, words[1:]):
        file = Path(value)
        if option not in INPUTS or file.is_absolute() or file.exists():
            continue
        if file.suffix:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text("{}\n")
        else:
            file.mkdir(parents=True)


def _check_file(command: Command, name: str, options: list[str]) -> None:
    from zero_inference.cli import run_parser
    from zero_inference.config.run_options import config_from_args

    file = ROOT / command.folder / name
    if not file.is_file():
        raise command.wrong(f"there is no file {name}")
    if file == ROOT / "run_model.py":
        config_from_args(run_parser().parse_args(options))
        return
    if file.suffix == ".sh" and not os.access(file, os.X_OK) and command.words[0] == name:
        raise command.wrong(f"{name} is not executable")
    if _is_sweep(file):
        own, end = (
            (options[: options.index("--")], options[options.index("--") :]) if "--" in options else (options, [])
        )
        started = [sys.executable, str(file)] if file.suffix == ".py" else [str(file)]
        done = subprocess.run(
            [*started, *own, "--list", *end],
            cwd=ROOT,
            env=os.environ | {"PYTHON": sys.executable},
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise command.wrong(done.stderr.strip().splitlines()[-1])
        return
    for name in (option.partition("=")[0] for option in options):
        if not name.startswith("--") or name == "--":
            continue
        known = _help_of(file)
        if not re.search(rf"{name}(?![\w-])", known):
            raise command.wrong(f"{file.relative_to(ROOT)} has no option {name}")


def _is_sweep(file: Path) -> bool:
    return file.name == "sweep.py" or (file.suffix == ".sh" and "sweep.py" in file.read_text(encoding="utf-8"))


@cache
def _help_of(file: Path) -> str:
    """What says which options a script has: its --help, or its text if it is one of the shell."""
    if file.suffix != ".py":
        return file.read_text(encoding="utf-8")
    return subprocess.run([sys.executable, str(file), "--help"], cwd=ROOT, capture_output=True, text=True).stdout


def _launched(command: Command, program: str, words: Sequence[str]) -> tuple[str, list[str]]:
    """The script that a launcher starts and the script's options, by the launcher's own parser."""
    if program == "deepspeed":
        from deepspeed.launcher.runner import parse_args

        args = parse_args(list(words))
        return args.user_script, list(args.user_args)
    from torch.distributed.run import get_args_parser

    args = get_args_parser().parse_args(list(words))
    return args.training_script, list(args.training_script_args)


def _check_setup(command: Command) -> None:
    words = list(command.words)
    if words[0] in ("python", "python3") and words[1:2] == ["-m"] and words[2] in SETUP_MODULES:
        words = words[2:]
    elif words[0] not in SETUP:
        return _check_program(command, words)  # such as a script of the checkout, between two of the others
    if words[0] == "make":
        for target in (word for word in words[1:] if "=" not in word):
            if not re.search(rf"^{re.escape(target)}:", (ROOT / "Makefile").read_text(), re.MULTILINE):
                raise command.wrong(f"the Makefile has no target {target}")
    for extra in re.findall(r"(?:zero-inference|\.|whl)\[([\w,-]+)\]", command.text):
        for name in extra.split(","):
            if name not in extras():
                raise command.wrong(f"there is no extra {name}; there are {', '.join(extras())}")
    if words[:2] == ["docker", "build"] and "--target" in words:
        target = words[words.index("--target") + 1]
        if not re.search(rf"^FROM .* AS {re.escape(target)}$", (ROOT / "Dockerfile").read_text(), re.MULTILINE):
            raise command.wrong(f"the Dockerfile has no target {target}")
    for script in words[1:]:
        if script.startswith(("scripts/", "docker/")) and not (ROOT / script).is_file():
            raise command.wrong(f"there is no file {script}")


@cache
def extras() -> dict[str, list[str]]:
    """Extras of the package with what they ask for, read from its pyproject.toml; Python 3.10 has no parser for that."""
    text = (ROOT / "pyproject.toml").read_text().partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    return {
        name: ast.literal_eval(f"[{items}]") for name, items in re.findall(r"^(\w+) = \[(.*?)\]$", text, re.MULTILINE)
    }


def check_python(block: Block) -> None:
    """Raises WrongDocs for a syntax error, and for a name that the package does not have."""
    try:
        tree = ast.parse(block.text)
    except SyntaxError as error:
        raise block.wrong(f"{error.msg}: {(error.text or '').strip()}", block.line + (error.lineno or 1) - 1) from None
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("zero_inference"):
            continue
        line = block.line + node.lineno - 1
        try:
            module = importlib.import_module(node.module)
        except ImportError as error:
            raise block.wrong(str(error), line) from None
        for alias in node.names:
            if alias.name != "*" and not hasattr(module, alias.name):
                raise block.wrong(f"{node.module} has no {alias.name}", line)


class PageFolder:
    """The folder in which the commands of one page are run, in their order, as if it were a checkout.

    `launch` is how many commands of a launcher are started as processes of their own; others run in this process, as one rank.
    """

    def __init__(self, folder: Path, launch: int) -> None:
        self.folder, self.launch = folder, launch
        self.done: dict[int, int] = {}  # line of a command -> its exit code
        self.names: dict[str, object] = {"__name__": "__main__"}  # what the page's Python has defined
        for name in LINKED:
            if (ROOT / name).exists():
                (folder / name).symlink_to(ROOT / name)

    def run_until(self, steps: Sequence[Command | Block], last: Command | Block) -> int:
        """Runs what stands before `last` on the page and was not run yet, and `last`; its exit code."""
        for step in steps:
            if step.line not in self.done:
                self.done[step.line] = self._run(step)
            if step is last:
                break
        return self.done[last.line]

    def _run(self, step: Command | Block) -> int:
        if isinstance(step, Block) and step.kind == "file":
            file = self.folder / step.detail
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(step.text)
            return 0
        variables = step.variables if isinstance(step, Command) else {}
        where = self.folder / (step.folder if isinstance(step, Command) else ".")
        with in_folder(where), _variables(variables):
            if isinstance(step, Block):
                exec(compile(step.text, f"{step.page}:{step.line}", "exec"), self.names)
                return 0
            return self._start(step, list(step.words))

    def _start(self, command: Command, words: list[str]) -> int:
        from zero_inference.cli import console_main, main

        if words[0] in LAUNCHERS:
            if self.launch:
                self.launch -= 1
                path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
                return subprocess.run(words, env=without_gpus() | {"PATH": path}).returncode
            script, options = _launched(command, words[0], words[1:])
            words = ["python", script, *options]
        if words[0] in ("python", "python3"):
            words = words[1:]
            if words[:2] == ["-m", "zero_inference"]:
                words = ["zero-inference", *words[2:]]
        with _ended() as end:
            if words[0] == "zero-inference":
                end.code = console_main(words)
            elif words[0] == "run_model.py":
                end.code = main(words)
            elif words[0].endswith(".py"):
                end.code = _run_script(words)
            else:
                end.code = subprocess.run(words, env=without_gpus() | {"PYTHON": sys.executable}).returncode
        return end.code


class _End:
    code = 0


@contextlib.contextmanager
def _ended() -> Iterator[_End]:
    """Takes sys.exit() for the exit code that it is."""
    end = _End()
    try:
        yield end
    except SystemExit as left:
        end.code = left.code if isinstance(left.code, int) else int(left.code is not None)


@contextlib.contextmanager
def in_folder(folder: Path) -> Iterator[None]:
    """contextlib.chdir, which is newer than Python 3.10."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


@contextlib.contextmanager
def _variables(variables: dict[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            os.environ.pop(name)
            if name in before:
                os.environ[name] = before[name]


def _run_script(words: list[str]) -> int:
    argv, path = sys.argv, list(sys.path)
    sys.argv, sys.path[:0] = words, [str(Path(words[0]).resolve().parent)]
    try:
        runpy.run_path(words[0], run_name="__main__")
    finally:
        sys.argv, sys.path[:] = argv, path
    return 0
