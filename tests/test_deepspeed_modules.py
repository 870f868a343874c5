"""DeepSpeed's modules are compiled with several sources as one file, and apart where that fails. What they do is in test_tokens.py."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from zero_inference.engines.deepspeed.modules import TOGETHER, _load_joined, join_sources

NAME, PLACE = "async_io", TOGETHER["async_io"]


@pytest.fixture
def sources(tmp_path):
    """Of a module: two in the folder that is joined, one elsewhere."""
    for folder, names in ((PLACE, ("b.cpp", "a.cpp", "a.h", "z.h")), ("common", ("c.cpp", "c.h"))):
        (tmp_path / "csrc" / folder).mkdir(parents=True)
        for name in names:
            (tmp_path / "csrc" / folder / name).touch()
    return [str(tmp_path / "csrc" / name) for name in (f"{PLACE}/b.cpp", "common/c.cpp", f"{PLACE}/a.cpp")]


def test_sources_of_one_folder_are_one_file_that_stays_as_old_as_it_is(sources, tmp_path):
    apart, joined = join_sources(sources, PLACE, tmp_path / "built")
    place = tmp_path / "csrc" / PLACE
    assert apart == sources[1] and Path(joined).parent == tmp_path / "built"
    lines = [f'#import "{place}/a.h"', f'#import "{place}/z.h"', f'#include "{sources[0]}"', f'#include "{sources[2]}"']
    assert Path(joined).read_text().splitlines() == lines
    os.utime(joined, (1, 1))
    assert join_sources(sources, PLACE, tmp_path / "built") == [apart, joined] and os.stat(joined).st_mtime == 1
    (place / "new.h").touch()
    join_sources(sources, PLACE, tmp_path / "built")
    assert os.stat(joined).st_mtime > 1 and "new.h" in Path(joined).read_text()


class Builder:
    """As one of DeepSpeed's. `loaded` are the sources of each time, of which those that are joined do not compile."""

    def __init__(self, name: str, sources: list[str], loaded: list[list[str]]):
        self.name, self.sources, self.loaded = name, lambda: sources, loaded

    def deepspeed_src_path(self, source: str) -> str:
        return source

    def load(self, verbose: bool) -> None:
        self.loaded.append(self.sources())
        if any("joined" in source for source in self.sources()):
            raise RuntimeError("Error building extension")


def test_what_does_not_compile_as_one_file_is_compiled_apart_from_then_on(sources, tmp_path):
    loaded: list[list[str]] = []
    for _ in range(2):
        _load_joined(Builder(NAME, sources, loaded), tmp_path / "built")
    assert loaded[1:] == [sources, sources] and loaded[0] != sources, "tried once"
    _load_joined(Builder("deepspeed_shm_comm", sources, loaded), tmp_path / "other")
    assert loaded[3:] == [sources], "whose sources have names in common"
