"""README and docs: every command is checked by the parser that it would meet, and (slow) run; generated pages are current."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import re
import subprocess
import sys

import pytest
from conftest import ROOT, need_packages
from doc_commands import read_pages, run_steps, steps_of, what_is_wrong

PAGES = read_pages()
STEPS = {page: steps for page, text in PAGES.items() if (steps := steps_of(page, text))}
RUN = {page: runs for page, steps in STEPS.items() if (runs := [step for step in steps if not step.kind])}


@pytest.mark.parametrize("page", STEPS)
def test_commands_are_those_that_their_programs_take(page, tmp_path):
    with contextlib.chdir(tmp_path):
        wrong = [f"{step}: {words}" for step in STEPS[page] if (words := what_is_wrong(step))]
    assert not wrong, "\n" + "\n".join(wrong)


@pytest.mark.slow
@pytest.mark.parametrize("page", RUN)
def test_commands_run(page, tmp_path, no_gpu):
    run_steps(RUN[page], tmp_path)


# Options of other programs, which pages name in passing.
OTHERS = set(
    "--help --version --gpus --ipc --shm-size --ulimit --user --entrypoint --target --build-arg --membind --cpunodebind --no-deps "
    "--no-isolation --no-build-isolation --strict --num-gpus --num-nodes --nproc-per-node --hostfile --include --num-accelerators".split()
)


def test_options_in_the_prose_exist():
    from zero_inference.cli import console_parser, run_parser

    def options_of(parser) -> set[str]:
        found = set()
        for action in parser._actions:
            found.update(action.option_strings)
            if hasattr(action.choices, "values"):
                found.update(*(options_of(each) for each in action.choices.values()))
        return found

    files = [*(ROOT / "scripts").iterdir(), *(ROOT / "benchmarks").rglob("*.py")]
    scripts = "\n".join(file.read_text(encoding="utf-8") for file in files if file.suffix in (".py", ".sh"))
    known = options_of(run_parser()) | options_of(console_parser([], [])) | OTHERS
    known |= set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", scripts))
    for page, text in PAGES.items():
        prose = re.sub(r"^( *)(```+).*?^\1\2$", "", text, flags=re.DOTALL | re.MULTILINE)
        code = " ".join(re.findall(r"`([^`\n]+)`", prose))
        named = {name.replace("_", "-") for name in re.findall(r"(?<![\w-])--[a-z][a-z_-]*[a-z]", code)}
        assert named <= known, page


def test_generated_pages_are_up_to_date(capsys):
    spec = importlib.util.spec_from_file_location("generate_docs", ROOT / "scripts" / "generate_docs.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.main(["--check"]) == 0, capsys.readouterr().err


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path):
    need_packages("make docs", "mkdocs", "material")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", tmp_path / "site"],
        cwd=ROOT,
        env={"PATH": "/usr/bin:/bin", "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    names = {file.name for file in (tmp_path / "site").glob("*.html")}
    assert {"index.html", "options.html", "record.html", "install.html"} <= names


def test_messages_that_troubleshooting_quotes_are_in_the_code():
    quoted = re.findall(r"^\| `([^`]+)` \|", PAGES["docs/troubleshooting.md"], re.MULTILINE)
    assert len(quoted) > 10
    texts = [  # adjacent strings are one constant, as Python reads them
        node.value
        for path in (ROOT / "zero_inference").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    assert [message for message in quoted if not any(message in text for text in texts)] == []
