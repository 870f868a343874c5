"""`load` and `unload`; the work is in `placed_model`, which imports torch. And the check of keywords."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from zero_inference.config.options import OPTIONS
from zero_inference.config.other_tools import OTHER_OPTIONS
from zero_inference.config.run_config import make_config
from zero_inference.utils import garbage
from zero_inference.utils.format import closest

PLACEMENT = tuple(name for name, option in OPTIONS.items() if option.of_load)
ELSEWHERE = {
    **dict.fromkeys(set(OPTIONS) - set(PLACEMENT) - {"model"}, "it is for zero_inference.run()"),
    **dict.fromkeys(("prompt_len", "gen_len"), "max_length is that of prompt and generated tokens together"),
}


def load(
    model: str | Path,
    *,
    engine: str = "stream",
    batch_size: int = 1,
    max_length: int | None = None,
    scoring: bool = True,
    **placement: Any,
) -> Any:
    """Return a transformers model whose weights an engine has placed: on the device, in host memory or on disk.

        model = load("meta-llama/Llama-3.1-70B-Instruct", quant_bits=4)
        inputs = model.tokenizer("The capital of France is", return_tensors="pt")
        print(model.tokenizer.decode(model.generate(**inputs, max_new_tokens=16)[0]))
        model.unload()

    It is an instance of the model's own transformers class, for `generate`, calls, and tools such as lm-eval's
    `HFLM(pretrained=model, tokenizer=model.tokenizer)`. Inputs may be on any device. Weights cannot be moved, trained, changed or saved;
    PEFT's LoRA adapters work. `with load(...) as model:` unloads it at the end.

    Memory is planned for `batch_size` sequences of `max_length` tokens. A call of more raises UsageError, which says what to load with;
    more sequences are fine while they are shorter, so that there are no more tokens (without `kv_offload`).

    Args:
        model: hub name, local folder, or a built-in preset or model.
        engine: "stream", "deepspeed" (one process), "accelerate" (with `cpu_offload` or `disk_offload`), "resident" (all on the device),
            or "auto" (what is predicted to be fastest here).
        max_length: tokens of a sequence, prompt and generated ones; by default 2048, or the model's context if that is shorter.
        scoring: set device memory aside for the logits of all tokens, which scoring needs; False leaves it to weights.
        **placement: options of run_model.py: `quant_bits`, `gpu_memory`, `kv_offload`, `cpu_offload`, `disk_offload`, `offload_dir`,
            `cpu_compute`, `dtype`, `dummy`, `verbose`, ...

    Returns:
        the model, with four attributes more: `tokenizer` (it pads on the left, for batches; None where the checkpoint has none),
        `placement` (what is where, a list of sentences), `max_length` (tokens), and `unload()`.

    Raises:
        TypeError: there is no such keyword; the message has the nearest one.
        UsageError: it cannot work; nothing was loaded. RunError: loading failed.
    """
    check_keywords("load", placement, PLACEMENT, ELSEWHERE)
    config = make_config({"model": model, "engine": engine, "batch_size": batch_size, **placement})
    with garbage.postpone_collections():
        from zero_inference.api.placed_model import load_model

        return load_model(config, max_length, scoring)


def unload(model: Any) -> None:
    """Free all that a model of `load` holds: memory, threads, files. Calls of it raise UsageError from then on. Safe to call twice."""
    model.unload()


def check_keywords(function: str, given: Iterable[str], known: Collection[str], elsewhere: Mapping[str, str]) -> None:
    """Raise TypeError for a keyword that `function` does not have, with advice from `elsewhere` or the nearest that it has."""
    for name in given:
        if name in known:
            continue
        if name in elsewhere:
            raise TypeError(f"{function}() has no keyword {name!r}: {elsewhere[name]}")
        advice = OTHER_OPTIONS.get(name.replace("_", "-"), ())  # another tool's name for it
        meant = [each.partition(" ")[0].strip("-,").replace("-", "_") for each in advice]
        near = [each for each in meant if each in known][:1] or closest(name, known)
        hint = f"did you mean {', '.join(near)}?" if near else f"help(zero_inference.{function}) lists them."
        raise TypeError(f"{function}() got an unexpected keyword {name!r}; {hint}")
