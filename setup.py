"""The CUDA sources travel inside the package, as `zero_inference.csrc`; everything else is in pyproject.toml."""

from pathlib import Path

from setuptools import find_packages, setup

SOURCES = [str(folder) for folder in (Path("csrc"), *sorted(Path("csrc").rglob("*"))) if folder.is_dir()]

setup(
    packages=find_packages(include=["zero_inference", "zero_inference.*"]) + [f"zero_inference.{s.replace('/', '.')}" for s in SOURCES],
    package_dir={f"zero_inference.{s.replace('/', '.')}": s for s in SOURCES},
    package_data={"zero_inference.models": ["presets/*.json"], "zero_inference.micro": ["*.json"],
                  "zero_inference.html_report": ["page.html", "page.css", "page.js"],
                  **{f"zero_inference.{s.replace('/', '.')}": ["*.cu", "*.cuh", "*.h"] for s in SOURCES}},
)
