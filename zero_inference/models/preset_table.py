"""Built-in model configurations: the published dimensions of well-known models, for runs without a hub.

One JSON file per model in `presets/`, with `name` (hub name), `aliases`, `source` and `config`.
"""

from __future__ import annotations

import copy
import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zero_inference.utils.suggestions import closest

PRESET_FOLDER = Path(__file__).resolve().parent / "presets"


@dataclass(frozen=True)
class Preset:
    """A model of the hub.

    Attributes:
        name, aliases: its hub name, and short names.
        source: where the numbers come from.
        config: the arguments of its config.
        quantization: `quant_method` of the published weights; empty where they are not quantized.
    """

    name: str
    aliases: tuple[str, ...]
    source: str
    config: dict[str, Any]
    quantization: str = ""

    def to_config(self) -> Any:
        """A new transformers config, of the class its `model_type` names; imports transformers."""
        from transformers import AutoConfig

        # Copied: transformers edits nested values such as the rope parameters in place.
        return AutoConfig.for_model(**copy.deepcopy(self.config))


@functools.cache
def _presets() -> tuple[Preset, ...]:
    files = sorted(PRESET_FOLDER.glob("*.json"))
    presets = []
    for file in files:
        fields = json.loads(file.read_text(encoding="utf-8"))
        presets.append(Preset(**{**fields, "aliases": tuple(fields["aliases"])}))
    return tuple(presets)


@functools.cache
def _by_spelling() -> dict[str, Preset]:
    table: dict[str, Preset] = {}
    for preset in _presets():
        for spelling in (preset.name, *preset.aliases):
            other = table.setdefault(spelling.lower(), preset)
            if other is not preset:
                raise ValueError(f"presets {other.name} and {preset.name} both answer to {spelling!r}")
    return table


def find_preset(name: str) -> Preset | None:
    """The preset with this hub name or alias, upper and lower case alike; None if there is none."""
    return _by_spelling().get(name.strip().lower())


def similar_presets(name: str, n: int = 3) -> list[str]:
    """Up to `n` presets whose name or alias resembles `name`, best first, each in its closest spelling."""
    nearest: dict[str, str] = {}  # by the preset's name
    spellings = [each for preset in _presets() for each in (preset.name, *preset.aliases)]
    for spelling in closest(name, spellings, most=len(spellings)):
        preset = find_preset(spelling)
        assert preset is not None, "its spellings are those of the presets"
        nearest.setdefault(preset.name, spelling)
    return list(nearest.values())[:n]
