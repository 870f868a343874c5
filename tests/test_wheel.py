"""A wheel and a source archive hold what is loaded at run time: built here, installed by the steps of the images, and tried."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from conftest import ROOT, need_packages, without_gpus

DATA = (
    "cards.json",
    "page.html",
    "page.css",
    "page.js",
    "opt-125m.json",
    "product_amx.cpp",
    "rms_norm.cu",
    "rows.cuh",
)
PROGRAM = "zero-inference"


def tracked_files() -> list[str]:
    """What a clone would have, without what is only measured: the checkout may hold builds of other versions."""
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a clone")
    return [name for name in listed.stdout.splitlines() if not name.startswith(("benchmarks/", "tests/"))]


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> dict[str, Path]:
    """The archive and, made of it, the wheel; by their suffix."""
    need_packages("python -m build", "build")
    checkout, out = tmp_path_factory.mktemp("clone"), tmp_path_factory.mktemp("dist")
    for name in tracked_files():
        if (ROOT / name).is_file():
            (checkout / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, checkout / name)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", out, "."]
    done = subprocess.run(
        command, cwd=checkout, env=os.environ | {"ZERO_INFERENCE_BUILD_CUDA": "0"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "Package would be ignored" not in done.stdout + done.stderr
    return {file.suffix: file for file in out.iterdir()}


def test_the_wheel_has_every_file_of_the_package_and_the_licence(built):
    names = set(zipfile.ZipFile(built[".whl"]).namelist())
    package = {
        name for name in tracked_files() if name.startswith(("zero_inference/", "csrc/")) and (ROOT / name).is_file()
    }
    packed = {name.replace("zero_inference/csrc/", "csrc/") for name in names if ".dist-info/" not in name}
    assert packed == package
    assert not [data for data in DATA if not any(name.endswith(f"/{data}") for name in packed)]
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_the_archive_has_what_a_wheel_is_built_of_and_no_tests(built):
    with tarfile.open(built[".gz"]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {
        "LICENSE",
        "CITATION.cff",
        "CHANGELOG.md",
        "pyproject.toml",
        "setup.py",
        "run_model.py",
        "csrc/cpu/product.cpp",
    } <= names
    assert not [name for name in names if name.startswith(("tests", "benchmarks", "docs"))]


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory) -> Path:
    """A virtual environment in which docker/install.sh has installed the wheel. Its libraries are those of this environment, so
    that none is installed again: what the requirements ask for has to be here already, as no index is given."""
    venv = tmp_path_factory.mktemp("venv")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    (libraries,) = (venv / "lib").glob("python*/site-packages")
    # a folder that a .pth file names is not searched for such files itself, so an editable package in it is not found
    outer = [path for path in sys.path if Path(path).name == "site-packages"]
    (libraries / "outer.pth").write_text("\n".join(outer) + "\n")
    environment = without_gpus() | {"VENV": str(venv), "PACKAGE": str(built[".whl"]), "PIP_NO_INDEX": "1"}
    environment.pop("PYTHONPATH")
    done = subprocess.run(
        ["bash", ROOT / "docker" / "install.sh", "python"], cwd=venv, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert (libraries / "zero_inference" / "__init__.py").is_file()
    return venv


def test_an_installed_wheel_passes_the_smoke_test_of_the_images(installed, tmp_path):
    environment = without_gpus() | {
        "PYTHON": str(installed / "bin" / "python"),
        "UNWANTED": str(ROOT),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "ZERO_INFERENCE_MACHINE": "/nowhere/machine.json",
    }
    environment.pop("PYTHONPATH")
    done = subprocess.run(
        ["bash", ROOT / "scripts" / "smoke_test.sh"], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-2000:]
    assert f"zero-inference is in {installed}" in done.stdout and done.stdout.endswith("smoke test: passed\n")


def test_the_smoke_test_fails_where_the_package_comes_from_a_checkout(tmp_path):
    """As it would if the environment's libraries were on the path before the wheel."""
    program = tmp_path / "bin" / PROGRAM
    program.parent.mkdir()
    program.write_text("#!/bin/sh\necho plan\n")
    program.chmod(0o755)
    python = program.with_name("python")
    python.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    environment = without_gpus() | {"PYTHON": str(python), "UNWANTED": str(ROOT)}
    done = subprocess.run(["bash", ROOT / "scripts" / "smoke_test.sh"], env=environment, capture_output=True, text=True)
    assert done.returncode != 0 and str(ROOT / "csrc") in done.stderr, done.stderr[-2000:]
