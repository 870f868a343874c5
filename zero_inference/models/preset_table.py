"""Built-in model configurations, one JSON file each in `presets/`, for runs without a hub."""

from __future__ import annotations

import copy
import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zero_inference.utils.format import closest

PRESET_FOLDER = Path(__file__).resolve().parent / "presets"


@dataclass(frozen=True)
class Preset:
    name: str  # on the hub
    aliases: tuple[str, ...]
    source: str  # where the numbers come from
    config: dict[str, Any]  # arguments of its transformers config
    quantization: str = ""  # `quant_method` of the published weights; empty if they are not quantized

    def to_config(self) -> Any:
        from transformers import AutoConfig

        # Copied: transformers edits nested values such as the rope parameters in place.
        return AutoConfig.for_model(**copy.deepcopy(self.config))


@functools.cache
def _preset_by_name() -> dict[str, Preset]:
    table: dict[str, Preset] = {}  # by name and aliases
    for file in sorted(PRESET_FOLDER.glob("*.json")):
        fields = json.loads(file.read_text(encoding="utf-8"))
        preset = Preset(**{**fields, "aliases": tuple(fields["aliases"])})
        table |= dict.fromkeys((preset.name, *preset.aliases), preset)
    return table


def find_preset(name: str) -> Preset | None:
    """Return the preset with this hub name or alias, in upper or lower case."""
    wanted = name.strip().lower()
    return next((preset for known, preset in _preset_by_name().items() if known.lower() == wanted), None)


def similar_presets(name: str, n: int = 3) -> list[str]:
    """Return up to `n` presets whose name or alias resembles `name`, best first, each in its closest spelling."""
    known = _preset_by_name()
    nearest: dict[str, str] = {}  # preset's name -> spelling
    for spelling in closest(name, known, most=len(known)):
        nearest.setdefault(known[spelling].name, spelling)
    return list(nearest.values())[:n]
