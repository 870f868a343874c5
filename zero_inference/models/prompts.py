"""The prompts of a run: [batch, prompt_len] token ids without padding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from zero_inference.config import RunConfig
from zero_inference.errors import UsageError
from zero_inference.models.spec import ModelSpec, load_tokenizer
from zero_inference.runtime.text import first_line

TEXT = (
    "A library card and a quiet table were all she needed to begin. The first book was about rivers, and it said that "
    "water always finds the lowest path.",
    "The engineer wrote the question on the board: how long does it take to move a hundred gigabytes through a narrow "
    "pipe, and who has to wait meanwhile?",
    "In the harbour the boats were coming home. Each captain called out the size of the catch, and the clerk on the "
    "quay wrote down every number.",
    "Bread needs flour, water, salt and patience. The baker who hurries has a loaf by noon; the baker who waits has "
    "customers by evening.",
    "Once a year the clockmaker opened the tower door and climbed two hundred steps, carrying oil, a lamp and a list of "
    "everything that was late.",
    "The capital of France is Paris, the capital of Italy is Rome, and the capital of Japan is Tokyo. The capital of Spain is",
)


def prompt_ids(config: RunConfig, spec: ModelSpec) -> tuple[torch.Tensor, Any, str | None]:
    """The prompts of a run: ids int64 [batch, prompt_len], the tokenizer (None without one) and what to say about them, if anything.

    Raises:
        UsageError: the prompts or the tokenizer cannot be used.
    """
    tokenizer = load_tokenizer(spec)
    if tokenizer is not None:
        lines = read_prompts(config.prompts, config.batch_size)
        return (
            readable_ids(spec.name, tokenizer, lines, config.prompt_len, spec.text_config.vocab_size),
            tokenizer,
            None,
        )
    if config.prompts:
        raise UsageError(f"--prompts {config.prompts}: {spec.name} has no tokenizer to read it with; drop --prompts.")
    note = None if spec.dummy else f"{spec.name} has no tokenizer: running on random token ids (seed {config.seed})"
    ids = random_ids(config.seed, config.batch_size, config.prompt_len, spec.text_config.vocab_size)
    return ids, None, note


def random_ids(seed: int, batch_size: int, prompt_len: int, vocab_size: int) -> torch.Tensor:
    """Token ids int64 [batch_size, prompt_len] that depend on the four arguments alone."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocab_size, (batch_size, prompt_len), generator=generator)


def readable_ids(name: str, tokenizer, prompts: list[str], prompt_len: int, vocab_size: int) -> torch.Tensor:
    """`text_ids`, all of them below `vocab_size`.

    Raises:
        UsageError: the tokenizer of model `name` cannot read the prompts, or is another model's.
    """
    instead = "replace the tokenizer files, or remove them to run on random ids."
    try:
        ids = text_ids(tokenizer, prompts, prompt_len)
    except Exception as error:  # whatever a tokenizer's own code raises
        raise UsageError(
            f"--model {name}: its tokenizer cannot encode the prompts ({first_line(error)}); {instead}"
        ) from error
    if (largest := int(ids.max())) >= vocab_size:
        raise UsageError(
            f"--model {name}: its tokenizer gives the id {largest}, and the model knows {vocab_size} tokens; {instead}"
        )
    return ids


def text_ids(tokenizer, prompts: list[str], prompt_len: int) -> torch.Tensor:
    """Tokenize each prompt to exactly `prompt_len` real tokens: int64 [len(prompts), prompt_len].

    A long prompt keeps its beginning. A short one keeps its end and is led in by the built-in text, after whatever the
    tokenizer puts at the start of a sequence.

    Raises ValueError where the tokenizer makes no tokens of the built-in text.
    """
    filler = tokenizer(" ".join(TEXT), add_special_tokens=False)["input_ids"]
    if not filler:
        raise ValueError("it makes no tokens of text")
    rows = []
    for prompt in prompts:
        plain = tokenizer(prompt, add_special_tokens=False)["input_ids"]
        full = tokenizer(prompt)["input_ids"]
        start = full[: _find(full, plain)]
        missing = max(0, prompt_len - len(start) - len(plain))
        lead = (filler * (missing // len(filler) + 1))[:missing]
        rows.append((start + lead + plain)[:prompt_len])
    return torch.tensor(rows, dtype=torch.int64)


def read_prompts(path: str | None, batch_size: int) -> list[str]:
    """`batch_size` prompts from a file of one prompt a line, or from the built-in text (repeated as needed).

    Raises:
        UsageError: the file has fewer prompts than the batch needs.
    """
    if path is None:
        return [TEXT[-1 - i % len(TEXT)] for i in range(batch_size)]
    try:
        # not splitlines, which also ends a line at characters that stand inside of prompts: form feeds, U+2028
        lines = [line.strip() for line in Path(path).read_text(encoding="utf-8-sig").split("\n") if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--prompts {path}: cannot be read as UTF-8 text ({error}).") from error
    if len(lines) < batch_size:
        raise UsageError(
            f"--batch-size {batch_size}: {path} has {len(lines)} prompts; add prompts or lower the batch size."
        )
    return lines[:batch_size]


def _find(full: list[int], part: list[int]) -> int:
    for start in range(len(full) - len(part) + 1):
        if full[start : start + len(part)] == part:
            return start
    return 0
