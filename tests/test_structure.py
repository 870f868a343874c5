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
    "errors": "The errors that end a run.",
    "utils": "Files, processes, ranks, environment, progress, tables, the log of a run.",
    "config": "The options of a run: declared once, read from the shell, YAML and Python, checked.",
    "records": "The log and the record of a run, written and read.",
    "kernels": "Building of compiled libraries; quantized weights and their products; fused kernels.",
    "cpu": "The CPU backend: thread pool, products, experts, attention, hand-off with a CUDA stream.",
    "norms": "Norm kernels, their reference and their patching into models.",
    "models": "From a model's name to its config, empty model, weights and prompts.",
    "kv_cache": "Keys and values on the device or in host memory.",
    "hardware": "Rates of a machine, measured, from a datasheet or assumed.",
    "engines": "Placement of weights and their way to the device.",
    "planning": "Memory and time of a run before anything is loaded; the search over configurations.",
    "measure": "The loops of a run, their timing and the roofline.",
    "quality": "Scores of the loaded model.",
    "report": "Records as tables and pages.",
    "micro": "Time of matrix products, element-wise operations and layers.",
    "architectures": "Models or configurations side by side.",
    "runner": "One run, from a config to a log and a record.",
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
