"""The package's house rules: what may import what. All is read from the sources; nothing is imported."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter

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


@cache
def imports() -> dict[tuple[str, ...], set[tuple[str, ...]]]:
    """The modules that each module imports, by their parts ("zero_inference", "utils", "files"); a package's own is "__init__"."""
    files = {file.relative_to(ROOT).with_suffix("").parts: file for file in (ROOT / PACKAGE).rglob("*.py")}
    by_name = {".".join(parts).removesuffix(".__init__"): parts for parts in files}
    return {
        parts: {by_name[name] for node in ast.walk(ast.parse(file.read_text())) for name in named(node, parts, by_name)}
        for parts, file in files.items()
    }


def named(node: ast.AST, importer: tuple[str, ...], modules: dict[str, tuple[str, ...]]) -> Iterator[str]:
    """The modules that a statement imports; a module's name in a string is for import_module."""
    names = []
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        base = ".".join([*importer[: -node.level], node.module or ""]).strip(".") if node.level else node.module
        names = [f"{base}.{alias.name}" if f"{base}.{alias.name}" in modules else base for alias in node.names]
    elif isinstance(node, ast.Constant) and isinstance(node.value, str) and "." in node.value:
        names = [node.value]
    return (name for name in names if name in modules)


def test_every_module_is_in_a_layer_and_imports_none_above_it():
    order = list(LAYERS)
    layers = {parts: parts[1] for parts in imports() if parts != (PACKAGE, "__init__")}
    assert set(layers.values()) == set(LAYERS) and len(layers) > 100
    upward = [
        f"{'.'.join(module)} imports {'.'.join(each)}"
        for module, layer in layers.items()
        for each in imports()[module]
        if each in layers and order.index(layers[each]) > order.index(layer)
    ]
    assert not upward


def test_no_modules_or_packages_of_a_folder_import_each_other_in_a_cycle():
    """So a package may not import a module beside it that imports one of the package's either."""
    graph: dict[tuple[str, ...], set[tuple[str, ...]]] = {}
    for module, imported in imports().items():
        for each in imported - {module}:
            shared = next(number for number, (a, b) in enumerate(zip(module, each)) if a != b)
            graph.setdefault(module[: shared + 1], set()).add(each[: shared + 1])
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        raise AssertionError("imports in a cycle: " + " <- ".join(".".join(parts) for parts in error.args[1])) from None
