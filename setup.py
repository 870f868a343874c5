"""The sources of the kernels travel inside the package, as `zero_inference.csrc`, and so does the library compiled of those for CUDA
where that can be done now (the one for the host's cores is compiled at first use, in some seconds); everything else is in pyproject.toml.

ZERO_INFERENCE_BUILD_CUDA=0 compiles nothing, 1 fails where it cannot be compiled, auto (the default) then installs without: the
library is compiled at first use, or PyTorch does its work.
"""

import os
import subprocess
import sys
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

SWITCH = "ZERO_INFERENCE_BUILD_CUDA"
SOURCES = [str(folder) for folder in (Path("csrc"), *sorted(Path("csrc").rglob("*"))) if folder.is_dir()]
BUILD = """
import sys
from pathlib import Path
try:
    import torch
except ImportError:
    sys.exit("torch is not installed")
sys.path.insert(0, sys.argv[1])
from zero_inference.kernels import extension
try:
    print("zero-inference: CUDA kernels compiled for", extension.prebuild(Path(sys.argv[2])))
except Exception as error:
    sys.exit(str(error))
"""


class BuildWithKernels(build_py):
    def run(self):
        super().run()
        wanted = os.environ.get(SWITCH, "auto")
        if wanted not in ("0", "1", "auto"):
            raise SystemExit(f"{SWITCH}={wanted}: use 0, 1 or auto")
        if wanted == "0" or self.editable_mode:
            return
        # -I: pip builds in an environment of its own, and the torch that counts is the one beside it
        folder = Path(self.build_lib).absolute() / "zero_inference" / "prebuilt"
        here = str(Path().absolute())  # not installed yet
        done = subprocess.run([sys.executable, "-I", "-c", BUILD, here, str(folder)], stderr=subprocess.PIPE, text=True)
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
            if wanted == "1":
                raise SystemExit(f"{SWITCH}=1, but the CUDA kernels cannot be compiled: {reason}")
            print(f"zero-inference: installing without compiled CUDA kernels: {reason}")


class WheelOfThisPlatform(bdist_wheel):
    """With a compiled library the wheel belongs to this platform, though to any Python 3."""

    def run(self):
        self.run_command("build_py")
        self.root_is_pure = not any(
            (Path(self.get_finalized_command("build_py").build_lib) / "zero_inference").rglob("*.so")
        )
        super().run()

    def get_tag(self):
        python, abi, platform = super().get_tag()
        return (python, abi, platform) if self.root_is_pure else ("py3", "none", platform)


OF_FOLDERS = {f"zero_inference.{source.replace('/', '.')}": source for source in SOURCES}

setup(
    cmdclass={"build_py": BuildWithKernels, "bdist_wheel": WheelOfThisPlatform},
    packages=find_packages(include=["zero_inference", "zero_inference.*"]) + list(OF_FOLDERS),
    package_dir=OF_FOLDERS,
    include_package_data=False,  # what is listed here, and not whatever MANIFEST.in has for the source archive
    package_data={
        "zero_inference.models": ["presets/*.json"],
        "zero_inference.hardware": ["*.json"],
        "zero_inference.report.html": ["page.html", "page.css", "page.js"],
        **{package: ["*.cu", "*.cuh", "*.h", "*.cpp", "*.md"] for package in OF_FOLDERS},
    },
)
