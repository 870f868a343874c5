"""From the value of --model to a transformers config, a folder of weights (or none) and a dtype."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from zero_inference.config.option import STORED
from zero_inference.config.run_config import RunConfig
from zero_inference.errors import RunError, UsageError
from zero_inference.models.built_in import SMOLLM2, Preset, find_preset, similar_presets, smollm2_checkpoint
from zero_inference.models.checkpoint_files import errors_as, find_shards, has_tokenizer, pop_quantization_config
from zero_inference.models.checkpoint_formats import CheckpointFormat, checkpoint_format
from zero_inference.models.hub import Snapshot, open_snapshot

# Bounds of sizes in a config.json: far beyond any model, and small enough to be counted and laid out within seconds.
BOUNDS = {
    "num_hidden_layers n_layer n_layers num_layers": (1, 4096),
    "vocab_size": (1, 1 << 28),
    "max_position_embeddings": (-1, 1 << 31),  # -1 in XLNet's config: its positions are relative
    "hidden_size word_embed_proj_dim": (1, 1 << 20),
    "intermediate_size ffn_dim": (1, 1 << 24),
    "num_attention_heads num_key_value_heads head_dim": (1, 1 << 16),
    "num_local_experts num_experts n_routed_experts num_experts_per_tok num_labels": (0, 1 << 16),
}
# Model types that publishers wrote code for, and that are another family's: read as this, without their code.
SAME_AS = {"kimi_k2": "deepseek_v3"}
_complete_folders: set[Path] = set()  # with all weights: large indexes take long to parse
TORCH_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True)
class ModelSpec:
    """A model before any weight is read."""

    name: str  # the value of --model
    config: Any  # the transformers config, without a quantization config
    folder: Path | None  # the local checkpoint; None for dummy weights or a hub model
    snapshot: Snapshot | None  # the hub model in the cache; None for any other
    dtype: torch.dtype
    dummy: bool
    trust_remote_code: bool = False
    checkpoint_format: CheckpointFormat | None = (
        None  # of a quantized checkpoint, or of the random weights in its place
    )
    dummy_routing: str | None = None  # text or greedy, see `models.weights`; None without dummy experts

    @property
    def text_config(self) -> Any:
        return self.config.get_text_config(decoder=True)

    @property
    def experts(self) -> tuple[int, int]:
        return count_experts(self.text_config)

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @property
    def max_positions(self) -> int | None:
        return max_positions(self.config)

    def kept_format(self, config: RunConfig) -> CheckpointFormat | None:
        """Return the format of the weights that a run keeps as the checkpoint stores them; None if it converts them."""
        return self.checkpoint_format if config.keeps_stored else None

    @property
    def weights_are_here(self) -> bool:
        """True if all files of the weights are in a local folder."""
        folder = self.folder or (self.snapshot.folder if self.snapshot is not None else None)
        if self.dummy or folder is None:
            return False
        if folder not in _complete_folders:
            with suppress(RunError):  # missing or damaged: loading says so
                find_shards(folder)
                _complete_folders.add(folder)
        return folder in _complete_folders

    def checkpoint_folder(self) -> Path:
        """Return the local folder with the weights, fetched from the hub if need be. Raises UsageError if they cannot be fetched."""
        return self.snapshot.fetch_weights() if self.snapshot else self.folder


def count_experts(text_config: Any) -> tuple[int, int]:
    """Return the number of experts in a layer (0 for a dense model), and of experts that a token chooses."""
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    number = next((number for name in names if (number := getattr(text_config, name, None))), 0)
    return number, getattr(text_config, "num_experts_per_tok", None) or number


def max_positions(config: Any) -> int | None:
    """Return the number of positions the model was made for, or None if it has no such limit (ALiBi)."""
    config = config.get_text_config(decoder=True)
    if getattr(config, "model_type", "") == "bloom":
        return None
    for key in ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length"):
        value = getattr(config, key, None)
        if isinstance(value, int) and value > 0:
            return value
    return None


def resolve_model(config: RunConfig, device_type: str) -> ModelSpec:
    """Find the model that `config` names; on device_type 'cpu' `--dtype auto` is bfloat16. Raises UsageError if it cannot be used."""
    source = _locate(config)
    if isinstance(source, Preset):
        model_config, folder = source.to_config(), None
    else:
        folder = source.folder if isinstance(source, Snapshot) else source
        model_config = _load_config(folder, config)
    quantization = source.quantization if isinstance(source, Preset) else pop_quantization_config(model_config, folder)
    checkpoint = None
    any_format = config.dummy and config.quant_bits != STORED  # of random weights
    with suppress(UsageError) if any_format else nullcontext():
        checkpoint = checkpoint_format(config.model, quantization) if quantization else None
    is_mixture = count_experts(model_config.get_text_config(decoder=True))[0] > 0
    spec = ModelSpec(
        name=config.model,
        config=model_config,
        folder=source if isinstance(source, Path) and not config.dummy else None,
        snapshot=source if isinstance(source, Snapshot) else None,
        dtype=_resolve_dtype(config, model_config, device_type, torch.bfloat16 if quantization else torch.float16),
        dummy=config.dummy,
        trust_remote_code=config.trust_remote_code,
        checkpoint_format=checkpoint,
        dummy_routing=config.dummy_routing if config.dummy and is_mixture else None,
    )
    if config.quant_bits == STORED:
        check_stored(spec)
    return spec


def check_stored(spec: ModelSpec) -> None:
    """Raise UsageError if there is no quantized checkpoint whose weights `--quant-bits stored` could keep."""
    if spec.checkpoint_format is None:
        raise UsageError(
            f"--quant-bits {STORED}: the weights of {spec.name} are not quantized; use --quant-bits 8 or 4 to quantize them, or drop it."
        )


def _locate(config: RunConfig) -> Path | Snapshot | Preset:
    """Return the folder or hub snapshot with the model's config.json; or, with --dummy, the preset of that name."""
    model, path = config.model, Path(os.path.expanduser(config.model))
    if model == SMOLLM2 or (model.lower() == SMOLLM2 and not path.is_dir()):
        return smollm2_checkpoint()
    if path.is_dir():
        if (path / "adapter_config.json").is_file():
            raise UsageError(
                f"--model {model}: the folder holds an adapter (adapter_config.json), which would not be applied; "
                "merge it into its base model and use the merged folder."
            )
        if not (path / "config.json").is_file():
            raise UsageError(
                f"--model {model}: the folder has no config.json; give a Hugging Face checkpoint folder (GGUF is not read)."
            )
        return path.absolute()
    preset = find_preset(model)
    if preset is not None and config.dummy:
        return preset
    if path.is_absolute() or model.startswith(("./", "../", "~")):
        raise UsageError(f"--model {model}: no such folder.")
    if config.dummy and "/" not in model and (similar := similar_presets(model)):
        raise UsageError(f"--model {model}: no such preset; did you mean {', '.join(similar)}?")
    snapshot = open_snapshot(model, preset.name if preset else model)
    if config.trust_remote_code:
        snapshot.fetch_code()
    return snapshot


def resolve_for_plan(config: RunConfig, device_type: str) -> ModelSpec:
    """Find the model for a plan, which reads no weights: presets need neither a network nor access to a gated repository."""
    known = find_preset(config.model) is not None and not Path(os.path.expanduser(config.model)).is_dir()
    return resolve_model(replace(config, dummy=True) if known else config, device_type)


def load_tokenizer(spec: ModelSpec):
    """Return the checkpoint's tokenizer, or None if it has none. Fetches no weights."""
    if spec.dummy:
        return None
    from transformers import AutoTokenizer

    folder = spec.snapshot.fetch_tokenizer() if spec.snapshot else spec.folder
    if not has_tokenizer(folder):
        return None
    remedy = "; replace or remove the tokenizer files."
    with errors_as(UsageError, f"--model {spec.name}: its tokenizer cannot be read", remedy):
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=spec.trust_remote_code)


def _load_config(folder: Path, config: RunConfig):
    from transformers import CONFIG_MAPPING, AutoConfig

    try:
        raw = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        raw = None  # explained by transformers
    for part in (raw, *raw.values()) if isinstance(raw, dict) else ():
        if isinstance(part, dict):  # transformers makes lists and tables of some sizes while it reads the file
            _check_sizes(config.model, part.get, only_large=True)
    with errors_as(UsageError, f"--model {config.model}: its config.json cannot be used"):
        same = SAME_AS.get(raw.get("model_type")) if isinstance(raw, dict) else None
        if same is None:
            loaded = AutoConfig.from_pretrained(folder, trust_remote_code=config.trust_remote_code)
        else:
            own = {name: value for name, value in raw.items() if name not in ("model_type", "auto_map")}
            loaded = CONFIG_MAPPING[same].from_dict(own)
        sizes = loaded.get_text_config(decoder=True)
    for part in (loaded, sizes):
        if getattr(part, "is_heterogeneous", False):  # else sizes that differ by layer raise, as Gemma 4's `head_dim`
            part.allow_global_per_layer_attribute_access = True
        part.return_dict = True
    _check_sizes(config.model, lambda name: getattr(sizes, name, None))
    # A checkpoint could name kernels on the hub, whose code would run. The choice is this machine's, the same for each checkpoint.
    loaded._attn_implementation = loaded._experts_implementation = None
    return loaded


def _check_sizes(model: str, value_of: Callable[[str], Any], only_large: bool = False) -> None:
    """Raise UsageError for a size out of bounds, also in a list with one for each layer."""
    for names, (least, most) in BOUNDS.items():
        for name in names.split():
            value = value_of(name)
            for size in value if isinstance(value, list | tuple) else [value]:
                is_number = isinstance(size, int | float) and not isinstance(size, bool)
                if is_number and not (size <= most and (only_large or size >= least)):  # also NaN
                    raise UsageError(
                        f"--model {model}: {name} in its config.json is {size:.6g}; it must be between {least} and {most}."
                    )


def _resolve_dtype(config: RunConfig, model_config, device_type: str, half: torch.dtype) -> torch.dtype:
    if config.dtype != "auto":
        if config.dtype == "float16" and device_type == "cpu" and config.engine == "deepspeed":
            raise UsageError("--dtype float16: DeepSpeed does not run float16 on a CPU; use bfloat16, float32 or auto.")
        return TORCH_DTYPES[config.dtype]
    if device_type == "cpu":
        return torch.bfloat16
    stored = getattr(model_config, "dtype", None)
    stored = TORCH_DTYPES.get(stored, half) if isinstance(stored, str) else stored
    # an unset dtype reads as float32, and half precision is what people run; float8 is a way to store weights
    return stored if stored in (torch.float16, torch.bfloat16) else half
