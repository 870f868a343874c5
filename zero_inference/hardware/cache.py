"""The cached hardware profile of this machine: measured once, and again after an update or when a busy CPU has become idle."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable
from pathlib import Path

from zero_inference.errors import UsageError
from zero_inference.hardware.profile import (
    MEASURED_WITH,
    HardwareProfile,
    newer_version_of,
    read_profile,
    write_profile,
)
from zero_inference.utils.environment import CpuContention, describe_environment, rate_versions
from zero_inference.utils.files import machine_path, make_folder

CONTENTION_S = 0.5  # to sample the CPU use of other programs


def profile_cache_path() -> Path:
    """Return the file that this version uses: the cache's, or one beside it if a newer version wrote that."""
    path = machine_path()
    return path if newer_version_of(path) is None else path.with_name(f"{path.stem}-v{MEASURED_WITH}{path.suffix}")


def cached_profile() -> HardwareProfile | None:
    """Return the cached profile; None if there is none, or if it is unreadable or outdated."""
    path = profile_cache_path()
    try:
        return _read(path, path.stat().st_mtime_ns)
    except OSError:
        return None


@functools.lru_cache(maxsize=1)  # plans ask for every candidate
def _read(path: Path, modified_ns: int) -> HardwareProfile | None:
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
    """Measure this machine if there is no cached profile, or if that was measured on a busy CPU which is less than half as busy now.

    Raises:
        UsageError: the cache file is not a hardware profile.
    """
    report_ignored_profile(say)
    known = cached_profile()
    if known is None or (known.busy() and _share_of_others() < (known.others_cpu_share or 0.0) / 2):
        measure_and_cache(say)


def report_ignored_profile(say: Callable[[str], None]) -> None:
    """Report that a newer version has written the cache file."""
    if (version := newer_version_of(machine_path())) is not None:
        name = profile_cache_path().name
        say(f"{machine_path()} is ignored: {version}; this version's rates are in {name} beside it")


def _share_of_others() -> float:
    others = CpuContention()
    time.sleep(CONTENTION_S)
    return others.share()


def measure_and_cache(say: Callable[[str], None]) -> None:
    """Measure this machine and write the cache file. Raises as `measure_if_needed`."""
    from zero_inference.hardware.measure_profile import measure_this_machine
    from zero_inference.hardware.overhead_process import OverheadProcess
    from zero_inference.utils.ranks import detect_ranks

    path = profile_cache_path()
    again = ""
    if path.exists():
        try:
            before = read_profile(path)
            again = f" again ({why_outdated(before) or f'it was measured {before.busy()}'})"
        except UsageError as error:
            raise UsageError(
                f"{path}: the hardware profile of this machine is cached here, but the file is not a hardware profile; remove it, or set "
                "ZERO_INFERENCE_MACHINE to another file."
            ) from error
    make_folder(path.parent)
    say(f"measuring this machine{again}; the results are kept until a version, the CPU or a GPU changes ...")
    with contextlib.closing(OverheadProcess()) as engines:
        report, profile = measure_this_machine(detect_ranks(), engines, None, say)
    for line in report["warnings"]:
        say(f"warning: {line}")
    write_profile(profile, path)
