"""README and docs: every command is run, or checked by the parser that it would meet; generated pages are current; the site builds."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, need_packages
from doc_blocks import Block, Command, WrongDocs, blocks, commands, pages, printed_commands, problems
from doc_commands import PageFolder, check, check_python, extras, in_folder

PAGES = pages(ROOT)
# Pages that do not keep the rules of doc_blocks.py yet, and are left out until they do.
NOT_CONVERTED: tuple[str, ...] = ()
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


STEPS = {page: [] if page in NOT_CONVERTED else steps_of(page, text) for page, text in PAGES.items()}
ALL = [
    (page, step)
    for page, steps in STEPS.items()
    for step in steps
    if not (isinstance(step, Block) and step.kind == "file")
]
RUN = [(page, step) for page, step in ALL if is_run(step)]


def name_of(value) -> str:
    return (
        str(value) if isinstance(value, Command) else f"{value.page}:{value.line}" if isinstance(value, Block) else "-"
    )


@pytest.mark.parametrize("page", PAGES)
def test_blocks_say_what_they_hold(page):
    found = list(problems(PAGES[page], page))
    if page in NOT_CONVERTED:
        assert found, f"{page} keeps the rules now: take it out of NOT_CONVERTED"
    else:
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


def page_of(*lines: str) -> list[Command | Block]:
    return steps_of("page.md", "\n".join(lines) + "\n")


def test_commands_are_found_with_their_line_and_kind():
    found = page_of(
        "# Title", "", "```sh", "# a comment", "zero-inference plan --model opt-125m \\", "    --dummy   # why", "",
        "cd logs && HF_HUB_OFFLINE=1 zero-inference report .", "```", "", "1. In a list:", "   <!-- gpu: h200, the first row -->",
        "   ```sh", "   python run_model.py --model opt-13b --dummy", "   ```", "```text", "not a command", "```",
    )  # fmt: skip
    assert [(each.line, each.block.kind, each.words) for each in found] == [
        (5, "run", ("zero-inference", "plan", "--model", "opt-125m", "--dummy")),
        (8, "run", ("zero-inference", "report", ".")),
        (14, "gpu", ("python", "run_model.py", "--model", "opt-13b", "--dummy")),
    ]
    assert found[1].folder == "logs" and found[1].variables == {"HF_HUB_OFFLINE": "1"}


@pytest.mark.parametrize("line", [
    "zero-inference report logs | head", "zero-inference report logs > table", "zero-inference plan; ls", "zero-inference report *.jsonl",
    "python run_model.py --model $MODEL", "python run_model.py --prompt 'without an end", "make demo && make test", "HF_HUB_OFFLINE=1",
])  # fmt: skip
def test_what_needs_a_shell_is_refused(line):
    with pytest.raises(WrongDocs, match=r"page\.md:2: "):
        page_of("```sh", line, "```")


def test_quoted_signs_of_the_shell_are_text():
    (found,) = page_of("```sh", 'zero-inference compare --arm "a=--model X" --arm "b=--assume gpus=1|2;*"', "```")
    assert found.words[-1] == "b=--assume gpus=1|2;*"


@pytest.mark.parametrize("line, said", [
    ("python run_model.py --model opt-125m --dummy --cpu-offlod", "cpu-offlod"),
    ("python run_model.py --model opt-125m --dummy --cpu-offload --disk-offload", "disk-offload"),
    ("zero-inference run --model opt-125m --engine steam", "steam"),
    ("zero-inference plann --model opt-125m", "plann"),
    ("zero-inference plan --quant-bits 5", "5"),
    ("zero-inference micro matmul --size 5 --blocks opt", "blocks"),
    ('zero-inference compare --arm "a=--model opt-125m" --arm "b=--model opt-125m --quant-bit 4"', "quant-bit"),
    ("zero-inference compare --model opt-125m --model opt-1.3b -- --batch 4", "batch"),
    ("deepspeed --num_gpu_cards 2 run_model.py --model opt-125m", "num_gpu_cards"),
    ("deepspeed --num_gpus 2 run_model.py --model opt-125m --cpu-ofload", "cpu-ofload"),
    ("torchrun --nproc-per-node 2 run_model.py --model opt-125m --gen-length 3", "gen-length"),
    ("python run_models.py --model opt-125m", "run_models.py"),
    ("scripts/opt-30b.sh --dummy --batch 4", "--batch"),
    ("scripts/opt-31b.sh --dummy", "opt-31b.sh"),
    ("python benchmarks/run_cases.py --cases rms", "--cases"),
    ("accelerate launch run_model.py", "accelerate"),
    ("make demo", "make"),
])  # fmt: skip
def test_a_mistake_in_a_command_is_found(line, said, tmp_path):
    (command,) = page_of("<!-- hub: a checkpoint -->", "```sh", line, "```")
    with in_folder(tmp_path), pytest.raises(WrongDocs, match=re.escape(said)) as wrong:
        check(command)
    assert str(wrong.value).startswith("page.md:3: ")


@pytest.mark.parametrize("line, said", [
    ("make demos", "demos"), ("make lint --quiet; make tests", "tests"), ("pip install '.[speed]'", "speed"), ("curl something", "curl"),
    ("docker build --target tpu .", "tpu"), ("bash scripts/no_such_file.sh", "bash"), ("sudo bash scripts/no_such_file.sh", "no_such_file"),
])  # fmt: skip
def test_a_mistake_in_what_sets_up_is_found(line, said):
    (command,) = page_of("<!-- setup: installs -->", "```sh", line, "```")
    with pytest.raises(WrongDocs, match=said):
        check(command)


def test_right_commands_of_all_kinds_pass(tmp_path):
    marks = {
        "<!-- gpu: h200-beside, a row -->": [
            "python run_model.py --model opt-13b --dummy --cpu_offload",
            "zero-inference link --save box.json",
        ],
        "<!-- hub: gated -->": [
            "deepspeed --num_gpus 4 run_model.py --model facebook/opt-66b --cpu-offload --batch-size 32 --prompts mine.txt",
            "torchrun --nproc-per-node 4 run_model.py --model facebook/opt-66b --engine stream --batch-size 4",
            "python benchmarks/run_cases.py --case rms --dtype fp16",
            "scripts/opt-30b.sh --dummy --batch-size 8 -- --loops 5",
        ],
        "<!-- setup: installs -->": [
            "make demo PYTHON=python3.12", "pip install '.[quality]'", "source .venv/bin/activate", "python -m venv .venv",
        ],
    }  # fmt: skip
    with in_folder(tmp_path):
        for mark, lines in marks.items():
            for command in page_of(mark, "```sh", *lines, "```"):
                check(command)


@pytest.mark.parametrize(
    "mark", ["<!-- gpu: no-such-folder -->", "<!-- exits: sometimes -->", "<!-- tested: tests/test_no.py -->"]
)
def test_a_wrong_mark_is_found(mark):
    (command,) = page_of(mark, "```sh", "zero-inference plan --model opt-125m --dummy", "```")
    with pytest.raises(WrongDocs):
        check(command)


def test_an_unknown_mark_is_found():
    for mark in ("<!-- cuda: h200 -->", "<!-- gpu: -->"):
        with pytest.raises(WrongDocs, match="none of"):
            page_of(mark, "```sh", "zero-inference plan", "```")


@pytest.mark.parametrize("lines, said", [
    (["```", "zero-inference plan", "```"], "a block of nothing"),
    (["```bash", "zero-inference plan", "```"], "a block of bash"),
    (["```text", "$ ls", "```"], "a command in a block of text"),
    (["<!-- gpu: h200 -->", "```text", "what it printed", "```"], "only blocks of sh and python"),
    (["```sh", "zero-inference plan"], "no end"),
])  # fmt: skip
def test_what_would_hide_a_command_is_found(lines, said):
    found = list(problems("\n".join(lines), "page.md"))
    assert len(found) == 1 and said in found[0], found


def test_a_command_that_is_printed_is_checked_too(tmp_path):
    right, wrong = page_of(
        "```text", "A plan:", "zero-inference report logs", "  python run_model.py --mode opt-125m", "```"
    )
    with in_folder(tmp_path):
        check(right)
        with pytest.raises(WrongDocs, match=r"page\.md:4: .*--mode"):
            check(wrong)
    assert not is_run(right)


def test_python_is_checked_for_syntax_and_names():
    for text in ("x = (", "from zero_inference.norms import rms_normal", "from zero_inference.nothing import x"):
        (block,) = page_of("```python", text, "```")
        with pytest.raises(WrongDocs, match=r"page\.md:2: "):
            check_python(block)
    (block,) = page_of("```python", "from zero_inference.norms import rms_norm", "```")
    check_python(block)


def test_commands_of_a_page_share_a_folder_and_each_is_run_once(tmp_path, no_gpu, capfd):
    steps = page_of(
        "<!-- file: prompts.txt -->", "```text", "Hello", "```", "```python", "n = open('prompts.txt').read()", "```",
        "```sh", "python run_model.py --model opt-125m --dummy --engine resident --prompt-len 4 --gen-len 2 --loops 1 --warmup 0",
        "zero-inference report logs --format csv", "```", "```python", "assert n == 'Hello\\n'", "```",
        "<!-- exits: 2 -->", "```sh", "zero-inference plan", "```",
    )  # fmt: skip
    folder = PageFolder(tmp_path, launch=0)
    assert folder.run_until(steps, steps[3]) == 0
    assert "facebook/opt-125m" in (printed := capfd.readouterr().out) or "opt-125m" in printed
    before = list((tmp_path / "logs").iterdir())
    assert folder.run_until(steps, steps[5]) == 2 and list((tmp_path / "logs").iterdir()) == before
    assert len(folder.done) == 6


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


def test_an_option_in_the_prose_that_is_misspelt_is_found():
    assert options_in_prose("Take `--cpu-offlod` or `--kv_offload 1`.\n```sh\nx --other\n```\n") == {
        "--cpu-offlod",
        "--kv-offload",
    }
    assert "--cpu-offlod" not in known_options() and "--kv-offload" in known_options()


def generator():
    spec = importlib.util.spec_from_file_location("generate_docs", ROOT / "scripts" / "generate_docs.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_generated_pages_are_up_to_date(capsys):
    assert generator().main(["--check"]) == 0, capsys.readouterr().err


def test_a_page_that_is_behind_is_told_and_written_anew(tmp_path, capsys):
    made = generator()
    assert (
        made.main(["--check", "--docs", str(tmp_path)]) == 1 and "options.md is out of date" in capsys.readouterr().err
    )
    assert not list(tmp_path.iterdir())
    assert made.main(["--docs", str(tmp_path)]) == 0 and made.main(["--check", "--docs", str(tmp_path)]) == 0
    options, record = (tmp_path / "options.md").read_text(), (tmp_path / "record.md").read_text()
    assert (
        "| `--quant-group-size N` | 64 with 8 bits, 32 with 4 |" in options and "## zero-inference compare" in options
    )
    assert "| `limit.link_gbps` | GB/s |" in record and "| `loops[].step_s` |" in record


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


def test_extras_are_read_from_the_project():
    assert extras()["test"] == ["pytest", "pytest-xdist"] and {"quality", "smollm2", "bench", "docs"} <= set(extras())
