"""The sources of the kernels travel inside the package, as `zero_inference.csrc`; they are compiled at first use on a machine.

Everything else is in pyproject.toml.
"""

from pathlib import Path

from setuptools import find_packages, setup

SOURCES = {
    f"zero_inference.{folder}".replace("/", "."): str(folder)
    for folder in (Path("csrc"), *sorted(Path("csrc").rglob("*")))
    if folder.is_dir()
}

setup(
    packages=find_packages(include=["zero_inference", "zero_inference.*"]) + list(SOURCES),
    package_dir=SOURCES,
    include_package_data=False,  # what is listed here, and not whatever MANIFEST.in has for the source archive
    package_data={
        "zero_inference.models": ["presets/*.json"],
        "zero_inference.hardware": ["*.json"],
        "zero_inference.report": ["page.html", "page.css", "page.js"],
        **{package: ["*.cu", "*.cuh", "*.h", "*.cpp", "*.md"] for package in SOURCES},
    },
)
