"""The package's house rules: what may import what.

All is read from the sources; nothing is imported.
"""

from __future__ import annotations

import ast
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from conftest import ROOT

PACKAGE = "zero_inference"
# Lowest first: each may import the entries before it, and itself. Imports inside functions and for types alone count too.
LAYERS = {
    "errors": "The ways in which a run ends badly, which every other part raises.",
    "runtime": "Process, machine and files: what would be the same in a program that runs no model.",
    "utils": "The log contract: the sizes that users know, the log's name and block.",
    "config": "Every choice of a run and what can be refused before a model is known.",
    "options": "How every command reads its line; the options of run_model.py, typed or in a file.",
    "records": "The log and the record of a run, written and read.",
    "quantization": "Groups of int8 and int4, whoever stores them.",
    "cores": "What the host's cores compute, and how a device's stream meets them.",
    "norms": "Norm kernels, their reference, and their place in models.",
    "models": "A name becomes a config, a skeleton and weights.",
    "fused": "Kernels for several of PyTorch's, in models for which a trial gives the same.",
    "kv_cache": "Keys and values, on the device or in host memory.",
    "link": "Measured rates of the machine: link, disk, device.",
    "machine": "The hardware that a plan is for: this machine, or one that a file describes.",
    "engines": "Who holds the weights and brings them to the device.",
    "planning": "What is needed where, and whether it is there and alike on all ranks, before anything is loaded.",
    "search": "Configurations compared by what is predicted of them.",
    "measure": "The loops, their timing, and the limit they are compared with.",
    "quality": "The loaded model scored.",
    "report": "Records as tables and pages.",
    "micro": "Where the time of a layer goes.",
    "architectures": "Models or configurations side by side.",
    "running": "One run, from a configuration to a log and a record.",
    "api": "The same from Python: run, plan, load.",
    "cli": "Entry points and exit codes.",
    "__main__": "python -m zero_inference.",
}


class Import(NamedTuple):
    file: Path
    line: int
    importer: str
    imported: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.importer} imports {self.imported}"


def sources(root: Path) -> dict[str, Path]:
    """The modules of the package below `root`, by dotted name."""
    found = {}
    for file in sorted((root / PACKAGE).rglob("*.py")):
        parts = file.relative_to(root).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


def imports(root: Path) -> list[Import]:
    """Of modules of the package by each other, wherever in the file they stand; a module's name in a string is for import_module."""
    modules = sources(root)
    found = []
    for importer, file in modules.items():
        for node in ast.walk(ast.parse(file.read_text(), str(file))):
            for imported in named_modules(node, importer, file, modules):
                found.append(Import(file.relative_to(root), node.lineno, importer, imported))
    return found


def named_modules(node: ast.AST, importer: str, file: Path, modules: dict[str, Path]) -> Iterator[str]:
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            parents = importer.split(".") + ["__init__"] * (file.name == "__init__.py")
            base = ".".join([*parents[: -node.level], *([base] if base else [])])
        names = [f"{base}.{alias.name}" if f"{base}.{alias.name}" in modules else base for alias in node.names]
    elif isinstance(node, ast.Constant) and isinstance(node.value, str) and "." in node.value:
        names = [node.value]
    else:
        return
    yield from dict.fromkeys(name for name in names if name in modules)


def upward(root: Path) -> list[str]:
    """Imports of a layer by one below it, and of or by what is in no layer."""
    order = list(LAYERS)
    wrong = [
        f"{file.relative_to(root)}:1: {module} is in no layer: give it a place in LAYERS"
        for module, file in sources(root).items()
        if module != PACKAGE and layer(module) not in order
    ]
    for each in imports(root):
        lower, higher = layer(each.importer), layer(each.imported)
        if {lower, higher} <= set(order) and order.index(higher) > order.index(lower):
            wrong.append(f"{each}, and {higher} is above {lower}")
    return wrong


def layer(module: str) -> str:
    return (module.split(".") + [""])[1]


def cycles(root: Path) -> list[str]:
    """The shortest ways from a module or package back to itself, of each folder's modules and packages among each other.

    So a package may not import a module beside it that imports one of the package's either.
    """
    modules = sources(root)
    following: dict[str, dict[str, Import]] = {}
    for each in imports(root):
        importer, imported = beside(place(each.importer, modules), place(each.imported, modules))
        if importer != imported:
            following.setdefault(importer, {}).setdefault(imported, each)
    ways = {}
    for start in following:
        way = way_back(start, following)
        if way:
            ways.setdefault(frozenset(way), way)
    return ["a cycle: " + "; ".join(map(str, way)) for way in ways.values()]


def place(module: str, modules: dict[str, Path]) -> list[str]:
    return module.split(".") + ["__init__"] * (modules[module].name == "__init__.py")


def beside(first: list[str], second: list[str]) -> tuple[str, str]:
    """What holds each of two modules in the innermost folder that holds both."""
    shared = next((n for n, (a, b) in enumerate(zip(first, second)) if a != b), min(len(first), len(second)) - 1)
    return ".".join(first[: shared + 1]), ".".join(second[: shared + 1])


def way_back(start: str, following: dict[str, dict[str, Import]]) -> list[Import]:
    ways, seen = deque((name, [each]) for name, each in following[start].items()), set()
    while ways:
        last, way = ways.popleft()
        if last == start:
            return way
        if last not in seen:
            seen.add(last)
            ways.extend((name, [*way, each]) for name, each in following.get(last, {}).items())
    return []


@pytest.mark.parametrize("rule", [upward, cycles])
def test_the_package_keeps_its_rules(rule):
    wrong = rule(ROOT)
    assert not wrong, "\n" + "\n".join(wrong)


def test_every_layer_is_there():
    there = {layer(module) for module in sources(ROOT)} - {""}
    assert set(LAYERS) == there


def test_what_breaks_a_rule_is_found(tmp_path):
    """In a package that breaks each of them in each way once."""
    files = {
        "__init__.py": "",
        "errors.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from zero_inference.models import spec\n",
        "runtime/__init__.py": "",
        "runtime/locks.py": "def lock():\n    import zero_inference.config\n",
        "runtime/text.py": "from ..records import names\nfrom . import locks\n",
        "config.py": "from zero_inference.errors import UsageError\n",
        "records/__init__.py": "names = ()\n",
        "engines/__init__.py": "MODULE = 'zero_inference.engines.stream'\n",
        "engines/stream.py": "from zero_inference import engines\n",
        "models/__init__.py": "",
        "models/spec.py": "from zero_inference.models import sizes\n",
        "models/sizes.py": "from zero_inference.models.skeleton import x\n",
        "models/skeleton.py": "def f():\n    from zero_inference.models.spec import x\n",
        "report/__init__.py": "",
        "report/tables.py": "from zero_inference.report.html import svg\n",
        "report/html/__init__.py": "",
        "report/html/svg.py": "",
        "report/html/page.py": "import zero_inference.report.tables\n",
        "misc.py": "",
    }
    for name, text in files.items():
        path = tmp_path / PACKAGE / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert upward(tmp_path) == [
        "zero_inference/misc.py:1: zero_inference.misc is in no layer: give it a place in LAYERS",
        "zero_inference/errors.py:3: zero_inference.errors imports zero_inference.models.spec, and models is above errors",
        "zero_inference/runtime/locks.py:2: zero_inference.runtime.locks imports zero_inference.config, and config is above runtime",
        "zero_inference/runtime/text.py:1: zero_inference.runtime.text imports zero_inference.records, and records is above runtime",
    ]
    assert cycles(tmp_path) == [
        "a cycle: zero_inference/engines/__init__.py:1: zero_inference.engines imports zero_inference.engines.stream; "
        "zero_inference/engines/stream.py:1: zero_inference.engines.stream imports zero_inference.engines",
        "a cycle: zero_inference/models/sizes.py:1: zero_inference.models.sizes imports zero_inference.models.skeleton; "
        "zero_inference/models/skeleton.py:2: zero_inference.models.skeleton imports zero_inference.models.spec; "
        "zero_inference/models/spec.py:1: zero_inference.models.spec imports zero_inference.models.sizes",
        "a cycle: zero_inference/report/html/page.py:1: zero_inference.report.html.page imports zero_inference.report.tables; "
        "zero_inference/report/tables.py:1: zero_inference.report.tables imports zero_inference.report.html.svg",
    ]
