"""The fenced blocks of README and docs, and the commands in them.

A block of `sh` holds commands as a user types them, one a line, continued after a backslash. What a test does with them is said
by a comment in the line above the block, which no reader sees:

    (none)                      each command is run, on the CPU, in a folder of its page
    <!-- exits: 2 -->           the same; it ends with that code
    <!-- gpu: FOLDER -->        needs a GPU; benchmarks/results/FOLDER is where it was run
    <!-- hub: WHY -->           needs the model hub or a checkpoint
    <!-- tested: FILE, WHAT -->  takes long, and the like is run by this file of tests
    <!-- setup: WHY -->         installs something or changes the machine

The last four are checked but not run. `python` blocks take the same comments. `<!-- file: NAME -->` above a block of any kind
puts its text into the page's folder before the commands below it. Lines of a `text` block that begin with a command, which a plan
prints for example, are checked too.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

KINDS = ("run", "exits", "gpu", "hub", "tested", "setup", "file")
# Anything else is either a command that nobody checks, or unnamed.
LANGUAGES = ("sh", "python", "text", "yaml", "json", "toml", "ini", "cpp", "diff", "dockerfile")
FENCE = re.compile(r"(?P<indent> *)(?P<fence>`{3,}|~{3,})\s*(?P<language>[\w+-]*)")
MARK = re.compile(r"\s*<!--\s*(?P<kind>[a-z]+):\s*(?P<detail>.*?)\s*-->\s*")
PRINTED = re.compile(
    r"\s*(zero-inference [a-z-]|(deepspeed|torchrun) .*run_model\.py|python3? [\w./-]+\.py|make [a-z]+$|pip install )"
)
OPERATORS = set("|;<>()&`$*")


class WrongDocs(Exception):
    """What is wrong, behind page and line."""


@dataclass(frozen=True)
class Block:
    page: str
    line: int  # of its first line of text
    language: str
    kind: str
    detail: str
    text: str

    def wrong(self, words: str, line: int | None = None) -> WrongDocs:
        return WrongDocs(f"{self.page}:{line or self.line}: {words}")


@dataclass(frozen=True)
class Command:
    """A line of an `sh` block: what it starts, where and with which variables."""

    block: Block
    line: int
    text: str
    words: tuple[str, ...]
    folder: str = "."
    variables: dict[str, str] = field(default_factory=dict)

    def wrong(self, words: str) -> WrongDocs:
        return self.block.wrong(f"{self.text}: {words}", self.line)

    def __str__(self) -> str:
        return f"{self.block.page}:{self.line}: {self.text[:60]}"


def blocks(text: str, page: str) -> list[Block]:
    """All fenced blocks. Raises WrongDocs for a comment that is not one of those above, and for a block without an end."""
    found, lines = [], text.splitlines()
    at = 0
    while at < len(lines):
        fence = FENCE.fullmatch(lines[at].split("#")[0].rstrip()) or FENCE.match(lines[at])
        if not fence:
            at += 1
            continue
        closing = re.compile(rf" *{fence['fence']}\s*")
        end = next((n for n in range(at + 1, len(lines)) if closing.fullmatch(lines[n])), None)
        if end is None:
            raise WrongDocs(f"{page}:{at + 1}: the block has no end")
        inside = [line.removeprefix(fence["indent"]) for line in lines[at + 1 : end]]
        kind, detail = _mark(lines[at - 1] if at else "", f"{page}:{at}")
        found.append(Block(page, at + 2, fence["language"], kind, detail, "\n".join(inside) + "\n"))
        at = end + 1
    return found


def _mark(line: str, where: str) -> tuple[str, str]:
    found = MARK.fullmatch(line)
    if not found:
        return "run", ""
    if found["kind"] not in KINDS[1:] or not found["detail"]:
        raise WrongDocs(
            f"{where}: {line.strip()} is none of {', '.join(f'<!-- {kind}: ... -->' for kind in KINDS[1:])}"
        )
    return found["kind"], found["detail"]


def commands(block: Block) -> list[Command]:
    """Those of an `sh` block. Raises WrongDocs for what one line of a shell cannot simply be split into."""
    found, kept, first = [], "", 0
    for number, line in enumerate(block.text.splitlines(), block.line):
        first = first if kept else number
        if line.rstrip().endswith("\\"):
            kept += line.rstrip()[:-1] + " "
            continue
        text, kept = " ".join((kept + line).split()), ""
        if text and not text.startswith("#"):
            found.append(_command(block, first, text))
    if kept:
        raise block.wrong("the last line ends with a backslash", first)
    return found


def _command(block: Block, line: int, text: str) -> Command:
    try:
        words = shlex.split(text, comments=True)
        bare = [word for word in shlex.shlex(text, posix=False, punctuation_chars=True) if word[0] not in "\"'"]
    except ValueError as error:
        raise block.wrong(f"{text}: {error}", line) from None
    command = Command(block, line, text, ())
    folder, variables = ".", {}
    if words[:1] == ["cd"] and words[2:3] == ["&&"] and len(words) > 3:
        folder, words = words[1], words[3:]
        bare.remove("&&")
    while words and re.fullmatch(r"[A-Z_][A-Z0-9_]*=.*", words[0]):
        name, _, variables[name] = words.pop(0).partition("=")
    if block.kind != "setup" and any(OPERATORS & set(word) for word in bare):
        raise command.wrong(
            "one command a line, without pipes, redirections, lists, patterns and variables of the shell"
        )
    if not words:
        raise command.wrong("no command")
    return Command(block, line, text, tuple(words), folder, variables)


def problems(text: str, page: str) -> Iterator[str]:
    """What hides a command from the tests: blocks that do not say what they hold, and commands in those of other things."""
    try:
        found = blocks(text, page)
    except WrongDocs as error:
        yield str(error)
        return
    for block in found:
        where = f"{page}:{block.line - 1}"
        if block.language not in LANGUAGES:
            yield f"{where}: a block of {block.language or 'nothing'}: say sh for commands, text for output, or one of {LANGUAGES}"
        if block.language not in ("sh", "python") and block.kind not in ("run", "file"):
            yield f"{where}: only blocks of sh and python are run"
        for number, line in enumerate(block.text.splitlines(), block.line):
            if block.language == "text" and line.lstrip().startswith("$ "):
                yield f"{page}:{number}: a command in a block of text, where nothing runs it: {line.strip()[:60]}"


def printed_commands(block: Block) -> list[Command]:
    """Those in a block of text, such as the command that a plan ends with: checked like those that are not run."""
    output = replace(block, kind="hub", detail="printed")
    lines = enumerate(block.text.splitlines(), block.line)
    return [_command(output, number, " ".join(line.split())) for number, line in lines if PRINTED.match(line)]


def pages(root: Path) -> dict[str, str]:
    """README.md and docs/*.md by their names, with their text."""
    files = [root / "README.md", *sorted((root / "docs").glob("*.md"))]
    return {str(file.relative_to(root)): file.read_text(encoding="utf-8") for file in files}
