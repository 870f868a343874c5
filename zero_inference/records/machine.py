"""The keys of the record's `environment`, which `runtime.environment.describe_environment` fills."""

from __future__ import annotations

from dataclasses import dataclass

from zero_inference.records.key import key


@dataclass(frozen=True, slots=True)
class Gpu:
    """One that this process sees."""

    name: str | None = key("", "name of the GPU, from its driver", only_with="a GPU")
    memory_bytes: int | None = key("byte", "total memory of the GPU", only_with="a GPU")


@dataclass(frozen=True, slots=True)
class Environment:
    """Machine, versions and checkout; null for what cannot be found out."""

    cpu_model: str = key("", "name of the processor")
    cpu_cores: int | None = key("cores", "physical cores of the machine")
    cpu_threads_usable: int | None = key("threads", "hardware threads this process may run on")
    host_memory_bytes: int = key("byte", "total memory of the machine")
    host_memory_limit_bytes: int | None = key("byte", "memory limit of the process's cgroups; null without a limit")
    host_memory_available_bytes: int = key("byte", "memory available when the run began")
    memlock_bytes: int | None = key("byte", "limit of page-locked memory; null without a limit")
    gpus: list[Gpu] = key("", "GPUs visible to this process")
    gpu_driver: str | None = key("", "version of the GPU driver; null without a GPU")
    os: str = key("", "name and version of the operating system")
    kernel: str = key("", "version of the kernel")
    python: str = key("", "version of Python")
    packages: dict[str, str | None] = key("", "versions of the libraries a run uses, by name; null if not installed")
    git_commit: str | None = key("", "commit of the checkout this package runs from; null if it is not in one")
    git_dirty: bool | None = key("", "whether tracked files have uncommitted changes")
