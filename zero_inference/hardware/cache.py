"""The cached hardware profile of this machine: measured once, and again after an update."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

from zero_inference.errors import UsageError
from zero_inference.hardware.profile import MEASURED_WITH, HardwareProfile, read_profile, write_profile
from zero_inference.utils.environment import describe_environment, rate_versions
from zero_inference.utils.files import machine_path, make_folder


def cached_profile() -> HardwareProfile | None:
    """Return the cached profile; None if there is none, or if it is unreadable or outdated."""
    path = machine_path()
    try:
        return _read_current(path, path.stat().st_mtime_ns)
    except OSError:
        return None


@functools.lru_cache(maxsize=1)  # plans ask for every candidate
def _read_current(path: Path, modified_ns: int) -> HardwareProfile | None:
    try:
        found = read_profile(path)
    except UsageError:
        return None
    return None if why_outdated(found) else found


def why_outdated(profile: HardwareProfile) -> str | None:
    """Return what has changed since the profile was measured; None if it is current."""
    if profile.measured_with < MEASURED_WITH:
        return "the profile is from an older version"
    now = describe_environment()
    for name, version in rate_versions(now).items():
        if profile.versions.get(name) != version:
            return f"{name.replace('_', ' ')} was {profile.versions.get(name)} and is {version}"
    if [gpu.name for gpu in profile.gpus] != [gpu["name"] for gpu in now["gpus"]]:
        return "its GPUs have changed"
    return None


def measure_if_needed(say: Callable[[str], None]) -> None:
    """Measure this machine if there is no cached profile.

    Raises:
        UsageError: the cache file is not a hardware profile.
    """
    if cached_profile() is None:
        measure_and_cache(say)


def measure_and_cache(say: Callable[[str], None]) -> None:
    """Measure this machine and write the cache file. Raises as `measure_if_needed`."""
    from zero_inference.hardware.measure_profile import measure_this_machine
    from zero_inference.utils.ranks import detect_ranks

    path = machine_path()
    again = ""
    if path.exists():
        try:
            before = read_profile(path)
        except UsageError as error:
            raise UsageError(
                f"{path}: the hardware profile of this machine is cached here, but the file is not one that this version reads; remove it, "
                "or set ZERO_INFERENCE_MACHINE to another file."
            ) from error
        again = f" again ({why_outdated(before)})"
    make_folder(path.parent)
    say(f"measuring this machine{again}; the results are kept until a version, the CPU or a GPU changes ...")
    report, profile = measure_this_machine(detect_ranks(), None, say)
    for line in report["warnings"]:
        say(f"warning: {line}")
    write_profile(profile, path)
