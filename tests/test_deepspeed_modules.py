"""DeepSpeed's modules are compiled with several sources as one file and few headers, and apart where that fails. What they do is in
test_tokens.py."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from zero_inference.engines.deepspeed import modules
from zero_inference.engines.deepspeed.modules import JOINED, LIGHT_HEADER, _load_joined, join_sources
from zero_inference.errors import UsageError
from zero_inference.utils.files import EXTENSIONS

NAME, PLACE = "async_io", JOINED["async_io"]


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
    """As one of DeepSpeed's. `loaded` are sources and folders of headers of each time; only its own compile, or else `error`."""

    def __init__(self, name: str, sources: list[str], loaded: list[tuple[list[str], list[str]]], error=RuntimeError):
        self.name, self.sources, self.loaded, self.error = name, lambda: sources, loaded, error
        self.own = sources, ["csrc"]
        self.loading = False

    def include_paths(self) -> list[str]:
        if not self.loading:
            raise TypeError(
                "async_io takes itself to be for CUDA until it loads, and looks for a toolkit that may not be there"
            )
        return ["csrc"]

    def deepspeed_src_path(self, source: str) -> str:
        return source

    def load(self, verbose: bool) -> None:
        self.loading = True
        self.loaded.append((self.sources(), self.include_paths()))
        if self.loaded[-1] != self.own:
            raise self.error("Error building extension")


def test_what_does_not_compile_as_one_file_is_compiled_apart_from_then_on(sources, tmp_path):
    loaded: list[tuple[list[str], list[str]]] = []
    for _ in range(2):
        _load_joined(Builder(NAME, sources, loaded), tmp_path / "built")
    headers = str(tmp_path / "built" / "headers")
    assert loaded[1:] == [(sources, ["csrc"])] * 2, "tried once"
    assert loaded[0] == (join_sources(sources, PLACE, tmp_path / "built"), [headers, "csrc"])
    assert Path(headers, "torch", "extension.h").read_text() == LIGHT_HEADER
    _load_joined(Builder("deepspeed_shm_comm", sources, loaded, error=ImportError), tmp_path / "other")
    light = [str(tmp_path / "other" / "headers"), "csrc"]
    assert loaded[3:] == [(sources, light), (sources, ["csrc"])], "whose sources have names in common"
    _load_joined(Builder("quantizer", sources, loaded), tmp_path / "third")
    assert loaded[5:] == [(sources, ["csrc"])], "which is compiled for a GPU"


class Compiled(Builder):
    """One that writes a module as torch does, and notes the folder; `error` comes after."""

    def __init__(self, loaded: list, error: Exception | None = None):
        super().__init__("quantizer", [], loaded)
        self.fails = error
        self.cxx_args = list

    def load(self, verbose: bool) -> None:
        folder = Path(os.environ["TORCH_EXTENSIONS_DIR"], self.name)
        self.loaded.append(folder)
        (folder / "quantizer.o").write_text("half")
        if self.fails:
            raise self.fails
        (folder / "quantizer.so").touch()


@pytest.mark.parametrize("ours", [True, False])
def test_a_module_is_compiled_in_a_folder_of_its_own_that_takes_its_place_when_it_is_complete(
    ours, monkeypatch, tmp_path
):
    extensions = tmp_path / EXTENSIONS if ours else tmp_path
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(extensions))
    extensions.mkdir(parents=True, exist_ok=True)
    kept, folders = extensions / "quantizer", []
    if ours:  # what a version before this one left of a build that was ended
        kept.mkdir()
        (kept / "quantizer.o").write_text("half")
    (extensions / ".building-quantizer-killed").mkdir()
    with pytest.raises(RuntimeError):
        modules._load(Compiled(folders, RuntimeError("Error building extension")), kept)
    assert not list(extensions.glob(".building-*")) and kept.exists() == ours
    for _ in range(2):
        modules._load(Compiled(folders), kept)
    assert kept not in folders[:2] and folders[2] == kept, "the third found it"
    assert sorted(path.name for path in kept.iterdir()) == ["quantizer.o", "quantizer.so"]
    assert os.environ["TORCH_EXTENSIONS_DIR"] == str(extensions)


def test_without_a_compiler_it_is_said_what_to_install(monkeypatch, tmp_path):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "cache"))
    with pytest.raises(UsageError, match=r"module has to be compiled here: no C\+\+ compiler.*apt install g\+\+"):
        modules.check_compilers(True, False, False)
    with pytest.raises(UsageError, match=r"reads NVMe: no C\+\+ compiler.*apt install g\+\+"):
        modules.check_aio(False)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "file" / "cache"))
    (tmp_path / "file").touch()
    with pytest.raises(
        UsageError, match=r"/file is a file; remove it, or name another folder with TORCH_EXTENSIONS_DIR"
    ):
        modules.check_compilers(True, False, False)
