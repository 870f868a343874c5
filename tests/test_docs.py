"""README and docs: every command is run, or checked by the parser that it would meet; generated pages are current; the site builds."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, need_packages
from doc_blocks import Block, Command, blocks, commands, pages, printed_commands, problems
from doc_commands import PageFolder, check, check_python, in_folder

PAGES = pages(ROOT)
LAUNCHED = 1  # commands that a launcher starts; each takes ten seconds


def steps_of(page: str, text: str) -> list[Command | Block]:
    """What a page asks to be done, in its order: commands, Python and files."""
    found: list[Command | Block] = []
    for block in blocks(text, page):
        if block.language == "sh" and block.kind != "file":
            found += commands(block)
        elif block.language == "python" or block.kind == "file":
            found.append(block)
        elif block.language == "text":
            found += printed_commands(block)
    return found


def is_run(step: Command | Block) -> bool:
    return (step.block if isinstance(step, Command) else step).kind in ("run", "exits", "file")


STEPS = {page: steps_of(page, text) for page, text in PAGES.items()}
ALL = [
    (page, step)
    for page, steps in STEPS.items()
    for step in steps
    if not (isinstance(step, Block) and step.kind == "file")
]
# `make test` runs the README's commands, `make test-all` those of docs/ too.
RUN = [
    pytest.param(*each, marks=[pytest.mark.slow] if each[0] != "README.md" else []) for each in ALL if is_run(each[1])
]


def name_of(value) -> str:
    return (
        str(value) if isinstance(value, Command) else f"{value.page}:{value.line}" if isinstance(value, Block) else "-"
    )


@pytest.mark.parametrize("page", PAGES)
def test_no_block_hides_a_command(page):
    found = list(problems(PAGES[page], page))
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize("page, step", ALL, ids=name_of)
def test_what_docs_tell_to_type_is_right(page, step, tmp_path):
    with in_folder(tmp_path):
        check(step) if isinstance(step, Command) else check_python(step)


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    folders: dict[str, PageFolder] = {}

    def get(page: str) -> PageFolder:
        if page not in folders:
            launch = LAUNCHED if not any(folder.launch == 0 for folder in folders.values()) else 0
            folders[page] = PageFolder(tmp_path_factory.mktemp(Path(page).stem), launch)
        return folders[page]

    return get


@pytest.mark.parametrize("page, step", RUN, ids=name_of)
def test_what_docs_tell_to_type_runs(page, step, folder_of, no_gpu, capfd):
    expected = int(step.block.detail.split()[0]) if isinstance(step, Command) and step.block.kind == "exits" else 0
    code = folder_of(page).run_until([each for each in STEPS[page] if is_run(each)], step)
    assert code == expected, capfd.readouterr().err[-2000:]


# Options of other programs, which pages name in passing.
OTHERS = {"--help", "--version"} | set(
    "--gpus --ipc --shm-size --ulimit --user --entrypoint --target --build-arg --membind --cpunodebind".split()
    + "--no-deps --no-isolation --no-build-isolation --strict".split()
)


def known_options() -> set[str]:
    """Of run_model.py, zero-inference, and of what lies in scripts/ and benchmarks/."""
    from zero_inference.cli import console_parser, run_parser

    def of(parser) -> set[str]:
        found = set()
        for action in parser._actions:
            found.update(action.option_strings)
            if hasattr(action.choices, "values"):
                found.update(*(of(each) for each in action.choices.values()))
        return found

    files = [*(ROOT / "scripts").iterdir(), *(ROOT / "benchmarks").rglob("*.py")]
    text = "\n".join(file.read_text(encoding="utf-8") for file in files if file.suffix in (".py", ".sh"))
    return of(run_parser()) | of(console_parser([], [])) | set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text)) | OTHERS


def options_in_prose(text: str) -> set[str]:
    """Names of options in inline code, outside of blocks; hyphens for underscores as the parsers do."""
    outside = re.sub(r"^( *)(```+).*?^\1\2$", "", text, flags=re.DOTALL | re.MULTILINE)
    spans = re.findall(r"`([^`\n]+)`", outside)
    return {name.replace("_", "-") for span in spans for name in re.findall(r"(?<![\w-])--[a-z][a-z_-]*[a-z]", span)}


@pytest.mark.parametrize("page", PAGES)
def test_options_in_the_prose_exist(page):
    launchers = {"--num-gpus", "--num-nodes", "--nproc-per-node", "--hostfile", "--include", "--num-accelerators"}
    assert options_in_prose(PAGES[page]) <= known_options() | launchers


def generator():
    spec = importlib.util.spec_from_file_location("generate_docs", ROOT / "scripts" / "generate_docs.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_generated_pages_are_up_to_date(capsys):
    assert generator().main(["--check"]) == 0, capsys.readouterr().err


@pytest.mark.slow
def test_the_site_builds_without_a_warning_and_fetches_nothing(tmp_path):
    need_packages("make docs", "mkdocs", "material")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", tmp_path / "site"],
        cwd=ROOT, env={"PATH": "/usr/bin:/bin", "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    html = {file.name: file.read_text(encoding="utf-8") for file in (tmp_path / "site").glob("*.html")}
    assert {"index.html", "options.html", "record.html", "install.html"} <= set(html)
    for name, text in html.items():
        fetched = re.findall(
            r"<(?:script|img|iframe)\b[^>]*\bsrc=\"?([^\s\">]+)|<link\b[^>]*\bhref=\"?([^\s\">]+)", text
        )
        assert fetched and not [url for pair in fetched for url in pair if url.startswith(("http", "//"))], name
    assert "<!-- gpu" not in re.sub(r"<!--.*?-->", "", html["install.html"], flags=re.DOTALL)


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
