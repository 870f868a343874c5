"""scripts/setup.sh removes nothing but an environment that it made; what it installs is pinned; .ci/run checks before it tests; a
package holds all sources of the kernels."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from conftest import ROOT


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


def test_a_folder_that_it_did_not_make_is_left_as_it_is(setup, tmp_path):
    for venv in ("my thesis", "../home"):
        folder = tmp_path / "a checkout" / venv
        folder.mkdir()
        (folder / "chapter").write_text("precious")
        _, done = setup(venv)
        assert done.returncode == 1 and f"{venv} is in use for something else" in done.stderr
        assert [file.name for file in folder.iterdir()] == ["chapter"] and (
            folder / "chapter"
        ).read_text() == "precious"
    (tmp_path / "a checkout" / "file").write_text("precious")
    folder, done = setup("file")
    assert done.returncode == 1 and folder.read_text() == "precious"


@pytest.mark.parametrize("marked", [".made", ".making", "nothing"])
def test_an_environment_that_a_link_leads_to_is_left_as_it_is(setup, tmp_path, marked):
    other, link = tmp_path / "another checkout", tmp_path / "a checkout" / ".venv"
    other.mkdir()
    link.symlink_to(other)
    if marked != "nothing":
        (other / marked).write_text(f"{other}\n")
    for venv in (".venv", ".venv/"):
        _, done = setup(venv)
        assert done.returncode == 1 and f"{venv} is a link to {other}" in done.stderr, done
        assert "make setup VENV=" in done.stderr and not done.stdout
    assert link.is_symlink() and [file.name for file in other.iterdir()] == [marked] * (marked != "nothing")


def test_what_was_interrupted_is_made_again(setup):
    folder, done = setup("my env")
    assert done.returncode == 7 and (folder / "bin").is_dir(), done
    (folder / "half").write_text("left over")
    _, done = setup("my env")
    assert done.returncode == 7 and "making" in done.stdout and not (folder / "half").exists()
    (folder / ".made").write_text("the place where it was before\n")
    (folder / ".making").unlink()  # as earlier versions left it
    _, done = setup("my env")
    assert done.returncode == 7 and not (folder / ".made").exists()


def test_what_is_installed_is_pinned_exactly():
    for name in ("requirements.txt", "requirements-dev.txt"):
        lines = [line for line in (ROOT / name).read_text().splitlines() if line and not line.startswith(("#", "-r "))]
        assert lines and all(re.fullmatch(r"[A-Za-z0-9_-]+==[0-9][0-9.]*", line) for line in lines), lines


@pytest.mark.parametrize(
    "failing, asked", [("nothing", ["lint", "test"]), ("lint", ["lint"]), ("test", ["lint", "test"])]
)
def test_continuous_integration_checks_the_code_and_then_tests_it(tmp_path, failing, asked):
    make = tmp_path / "make"
    make.write_text(f'#!/bin/sh\necho "$*" >>{tmp_path}/asked\n[ "$1" != {failing} ]\n')
    make.chmod(0o755)
    done = subprocess.run([ROOT / ".ci" / "run"], cwd="/", env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, check=False)
    assert (tmp_path / "asked").read_text().split() == asked
    assert (done.returncode == 0) == (failing == "nothing")


def test_the_kernels_are_compiled_by_an_installation_of_a_package_that_is_not_installed_yet(tmp_path):
    """Without the links of an editable installation, which `-S` leaves out."""
    module = ast.parse((ROOT / "setup.py").read_text())
    (build,) = [
        ast.literal_eval(node.value)
        for node in module.body
        if isinstance(node, ast.Assign) and node.targets[0].id == "BUILD"
    ]
    libraries = f"import sys; sys.path.append({sysconfig.get_path('purelib')!r})\n"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", libraries + build, str(ROOT), str(tmp_path / "prebuilt")],
        env=os.environ | {"PATH": "/nowhere", "CUDA_HOME": "/nowhere"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert "without CUDA" in last or "nvcc" in last, done.stderr


def test_an_installed_package_has_all_sources_of_the_kernels(tmp_path):
    """Those for the host's cores are compiled of them at first use."""
    subprocess.run(
        [sys.executable, "setup.py", "-q", "egg_info", "-e", tmp_path, "build_py", "-d", tmp_path / "built"],
        cwd=ROOT,
        env=os.environ | {"ZERO_INFERENCE_BUILD_CUDA": "0"},
        check=True,
    )
    built = tmp_path / "built" / "zero_inference" / "csrc"
    packed, sources = (
        {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()}
        for folder in (built, ROOT / "csrc")
    )
    assert packed == sources and "cpu/product.cpp" in packed
    assert (tmp_path / "built" / "zero_inference" / "machine" / "cards.json").is_file(), (
        "typical machines are made of it"
    )
