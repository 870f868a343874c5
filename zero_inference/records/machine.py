"""The keys of the record's `environment`, which `runtime.environment.describe_environment` fills."""

from __future__ import annotations

from dataclasses import dataclass

from zero_inference.records.key import key


@dataclass(frozen=True, slots=True)
class Gpu:
    """One that this process sees."""

    name: str | None = key("", "as its driver calls it", only_with="a GPU")
    memory_bytes: int | None = key("byte", "all of its memory", only_with="a GPU")


@dataclass(frozen=True, slots=True)
class Environment:
    """Machine, versions and checkout; null for what cannot be found out."""

    cpu_model: str = key("", "name of the processor")
    cpu_cores: int | None = key("cores", "physical cores of the machine")
    cpu_threads_usable: int | None = key("threads", "threads that this process may be scheduled on")
    host_memory_bytes: int = key("byte", "all memory of the machine")
    host_memory_limit_bytes: int | None = key("byte", "what the process's cgroups allow; null without a limit")
    host_memory_available_bytes: int = key("byte", "what could still be taken when the run began")
    memlock_bytes: int | None = key("byte", "what may be page-locked; null without a limit")
    gpus: list[Gpu] = key("", "the GPUs that this process sees")
    gpu_driver: str | None = key("", "version of the GPU's driver; null without one")
    os: str = key("", "name and version of the operating system")
    kernel: str = key("", "version of the operating system's kernel")
    python: str = key("", "version of Python")
    packages: dict[str, str | None] = key("", "versions of what a run computes with, by name; null if not installed")
    git_commit: str | None = key("", "commit of the checkout that tracks this package; null if none does")
    git_dirty: bool | None = key("", "whether tracked files were changed since that commit")
