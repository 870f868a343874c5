"""This machine's description, kept in the user's cache: measured once, and anew when what it was measured with has changed, or when other
programs that used the CPU meanwhile have ended."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from zero_inference.errors import UsageError
from zero_inference.hardware.profile import MEASURED_WITH, newer_version_of
from zero_inference.utils.environment import CpuContention, describe_environment, rate_versions
from zero_inference.utils.files import machine_path, make_folder

if TYPE_CHECKING:
    from zero_inference.hardware.profile import HardwareProfile


LOOK_S = 0.5  # at the use of the CPU


def cached_profile() -> HardwareProfile | None:
    """None where there is no file, or where it cannot be read, or is out of date."""
    if not machine_path().exists():
        return None

    path = profile_cache_path()
    try:
        changed = path.stat().st_mtime_ns
    except OSError:
        return None
    return _read(path, changed)


def report_ignored_profile(say: Callable[[str], None]) -> None:
    """Say that a newer version keeps a file here."""
    from zero_inference.hardware.profile import newer_version_of

    if (version := newer_version_of(machine_path())) is not None:
        say(
            f"{machine_path()} is ignored: {version}; this version's rates are in {profile_cache_path().name} beside it"
        )


@functools.lru_cache(maxsize=1)
def _read(path: Path, changed: int) -> HardwareProfile | None:
    from zero_inference.hardware.profile import read_profile

    try:
        found = read_profile(path)
    except UsageError:
        return None
    return None if why_outdated(found) else found


def why_outdated(description: HardwareProfile) -> str | None:
    """What is no longer as it was when this machine was measured, in a few words."""
    from zero_inference.hardware.profile import MEASURED_WITH

    if description.measured_with < MEASURED_WITH:
        return "this version measures more of it"
    now = describe_environment()
    for name, version in rate_versions(now).items():
        if description.versions.get(name) != version:
            return f"{name.replace('_', ' ')} was {description.versions.get(name)} and is {version}"
    gpus = [gpu["name"] for gpu in now["gpus"]]
    if [gpu.name for gpu in description.gpus] != gpus:
        return "its GPUs have changed"
    return None


def measure_if_needed(say: Callable[[str], None]) -> None:
    """Measure this machine if no rates are kept, or if they were measured while other programs used much of the CPU and these use less than
    half as much now. Raises as `measure_and_cache`."""
    report_ignored_profile(say)
    known = cached_profile()
    if known is None or (known.busy() and _share_of_others() < (known.others_cpu_share or 0.0) / 2):
        measure_and_cache(say)


def _share_of_others() -> float:
    others = CpuContention()
    time.sleep(LOOK_S)
    return others.share()


def measure_and_cache(say: Callable[[str], None]) -> None:
    """Measure this machine and keep what was found; tells why, if it was measured before.

    Raises:
        UsageError: there is a file in its place that describes no machine.
    """
    from zero_inference.hardware.measure_profile import measure_this_machine
    from zero_inference.hardware.overhead_process import OverheadProcess
    from zero_inference.hardware.profile import read_profile, write_profile
    from zero_inference.utils.ranks import detect_ranks

    path = profile_cache_path()
    again = ""
    if path.exists():
        try:
            before = read_profile(path)
            again = f" again ({why_outdated(before) or f'it was measured {before.busy()}'})"
        except UsageError as error:
            raise UsageError(
                f"{path}: this machine's rates are kept here, but the file describes no machine; remove it, or let ZERO_INFERENCE_MACHINE "
                "name another file."
            ) from error
    make_folder(path.parent)
    say(f"measuring this machine{again}; the results are kept until a version, the CPU or a GPU changes ...")
    with contextlib.closing(OverheadProcess()) as engines:
        report, description = measure_this_machine(detect_ranks(), engines, None, say)
    for line in report["warnings"]:
        say(f"warning: {line}")
    write_profile(description, path)


def profile_cache_path() -> Path:
    """Return the file that this version reads and writes: that of the cache, or one beside it where a newer version has written that."""
    path = machine_path()
    return path if newer_version_of(path) is None else path.with_name(f"{path.stem}-v{MEASURED_WITH}{path.suffix}")
