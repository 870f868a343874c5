"""The prompts of a run, [batch, prompt_len] token ids without padding, and the settings of greedy generation."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from zero_inference.config.options import LONGEST_PROMPT
from zero_inference.config.run_config import RunConfig
from zero_inference.errors import UsageError
from zero_inference.models.checkpoint_files import errors_as
from zero_inference.models.spec import ModelSpec, load_tokenizer

if TYPE_CHECKING:
    from transformers import GenerationConfig

EXCERPT_LENGTH = 60  # characters of a prompt that are shown with its output
TOKENIZER_REMEDY = "; replace the tokenizer files, or remove them to run on random ids."
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


def with_prompt_length(config: RunConfig, spec: ModelSpec) -> RunConfig:
    """Return `config` with the length in tokens of its longest --prompt, unless --prompt-len is set."""
    if not config.prompt and not config.chat:
        return config
    tokenizer = _tokenizer_for_text(config, spec)
    if config.chat and not getattr(tokenizer, "chat_template", None):
        raise UsageError(f"--chat: {spec.name} has no chat template; drop --chat, or use a model made for chats.")
    if config.prompt_len != LONGEST_PROMPT:
        return config
    with errors_as(UsageError, f"--model {spec.name}: its tokenizer cannot encode the prompts", TOKENIZER_REMEDY):
        longest = max(sum(map(len, prompt_parts(tokenizer, text, config.chat))) for text in config.prompt)
    if longest == 0:
        raise UsageError(f"--prompt: the tokenizer of {spec.name} makes no tokens of it; write another text.")
    return replace(config, prompt_len=longest)


def prompt_ids(config: RunConfig, spec: ModelSpec) -> tuple[torch.Tensor, Any, str | None]:
    """Return ids int64 [batch, prompt_len], the tokenizer (None without one) and a note to print, if any."""
    tokenizer, vocab_size = _tokenizer_for_text(config, spec), spec.text_config.vocab_size
    if tokenizer is not None:
        with errors_as(UsageError, f"--model {spec.name}: its tokenizer cannot encode the prompts", TOKENIZER_REMEDY):
            ids = encode_prompts(tokenizer, _prompt_texts(config), config.prompt_len, config.chat)
        if (largest := int(ids.max())) >= vocab_size:
            raise UsageError(
                f"--model {spec.name}: its tokenizer gives the id {largest}, and the model knows {vocab_size} tokens"
                + TOKENIZER_REMEDY
            )
        return ids, tokenizer, None
    note = None if spec.dummy else f"{spec.name} has no tokenizer: running on random token ids (seed {config.seed})"
    return random_ids(config.seed, config.batch_size, config.prompt_len, vocab_size), None, note


def _tokenizer_for_text(config: RunConfig, spec: ModelSpec) -> Any:
    tokenizer = load_tokenizer(spec)
    if tokenizer is None and (config.prompt or config.prompts):
        option = "--prompt" if config.prompt else "--prompts"
        raise UsageError(f"{option}: {spec.name} has no tokenizer to read it with; drop {option}.")
    return tokenizer


def prompt_excerpts(config: RunConfig, ids: torch.Tensor, tokenizer: Any) -> list[str]:
    """Return the end of each prompt's last line; of a chat that of the user's text. Empty without a tokenizer."""
    if tokenizer is None:
        return []
    decoded = [tokenizer.decode(row, skip_special_tokens=True) for row in ids.tolist()]
    texts = _prompt_texts(config) if config.chat else decoded
    lines = [text.strip().splitlines()[-1] if text.strip() else "" for text in texts]
    return [line if len(line) <= EXCERPT_LENGTH else f"...{line[-EXCERPT_LENGTH:]}" for line in lines]


def eos_token_ids(spec: ModelSpec, tokenizer: Any) -> frozenset[int]:
    """Return the ids that end a text of this model: of its tokenizer, its config and its generation_config.json."""
    found = [getattr(source, "eos_token_id", None) for source in (tokenizer, spec.text_config)]
    folder = spec.snapshot.folder if spec.snapshot else spec.folder
    if folder is not None:
        with contextlib.suppress(OSError, ValueError, AttributeError):
            found.append(json.loads((folder / "generation_config.json").read_bytes()).get("eos_token_id"))
    flat = [one for ids in found for one in (ids if isinstance(ids, list) else [ids])]
    return frozenset(one for one in flat if isinstance(one, int))


def random_ids(seed: int, batch_size: int, prompt_len: int, vocab_size: int) -> torch.Tensor:
    """Return token ids int64 [batch_size, prompt_len] that depend on the four arguments alone."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocab_size, (batch_size, prompt_len), generator=generator)


def encode_prompts(tokenizer, prompts: list[str], prompt_len: int, chat: bool = False) -> torch.Tensor:
    """Tokenize each prompt to exactly `prompt_len` real tokens: int64 [len(prompts), prompt_len].

    A long prompt is cut at its end. Before a short one goes the built-in text, after what the tokenizer or the chat template begins with.
    """
    filler = tokenizer(" ".join(TEXT), add_special_tokens=False)["input_ids"]
    if not filler:
        raise ValueError("it makes no tokens of text")
    rows = []
    for prompt in prompts:
        before, text, after = prompt_parts(tokenizer, prompt, chat)
        room = prompt_len - len(before) - len(after)
        if room < 1 and after:
            raise UsageError(
                f"--prompt-len {prompt_len}: the chat template alone takes {prompt_len - room} tokens; ask for more."
            )
        missing = max(0, room - len(text))
        lead = (filler * (missing // len(filler) + 1))[:missing]
        rows.append((before + lead + text[: max(0, room)] + after)[:prompt_len])
    return torch.tensor(rows, dtype=torch.int64)


def prompt_parts(tokenizer, text: str, chat: bool) -> tuple[list[int], list[int], list[int]]:
    """Return the ids that the tokenizer or the chat template puts before a prompt's text, those of the text, and those after it."""
    if not chat:
        plain = tokenizer(text, add_special_tokens=False)["input_ids"]
        full = tokenizer(text)["input_ids"]
        starts = range(len(full) - len(plain) + 1)
        start = next((at for at in starts if full[at : at + len(plain)] == plain), 0)
        return full[:start], plain, []
    full, other = (  # two messages share what the template adds
        tokenizer.apply_chat_template(
            [{"role": "user", "content": message}], add_generation_prompt=True, tokenize=True, return_dict=False
        )
        for message in (text, TEXT[0] if text != TEXT[0] else TEXT[1])
    )
    start = _common_prefix(full, other)
    end = len(full) - min(_common_prefix(full[::-1], other[::-1]), len(full) - start)
    return full[:start], full[start:end], full[end:]


def _common_prefix(one: list[int], other: list[int]) -> int:
    return next((n for n, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other)))


def _prompt_texts(config: RunConfig) -> list[str]:
    """Return a prompt for each sequence: from a file of one prompt a line, or of --prompt or the built-in text, repeated as needed."""
    batch_size, path = config.batch_size, config.prompts
    if config.prompt or path is None:
        texts = config.prompt or TEXT[::-1]
        return [texts[number % len(texts)] for number in range(batch_size)]
    try:
        # not splitlines, which also splits at form feeds and U+2028, which prompts may contain
        lines = [line.strip() for line in Path(path).read_text(encoding="utf-8-sig").split("\n") if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--prompts {path}: cannot be read as UTF-8 text ({error}).") from error
    if len(lines) < batch_size:
        raise UsageError(
            f"--batch-size {batch_size}: {path} has {len(lines)} prompts; add prompts or lower the batch size."
        )
    return lines[:batch_size]


def greedy_config(new_tokens: int) -> GenerationConfig:
    """Return settings of `generate` for exactly `new_tokens` tokens, each the likeliest, with a KV cache. There is no padding."""
    from transformers import GenerationConfig

    return GenerationConfig(max_new_tokens=new_tokens, do_sample=False, num_beams=1, use_cache=True, pad_token_id=0)


def reset_generation_config(model) -> None:
    """Remove the checkpoint's sampling, forced tokens and stop words from `model`: they would change number and choice of tokens."""
    from transformers import GenerationConfig

    model.generation_config = GenerationConfig()


def disable_cudnn_attention() -> None:
    """Exclude cuDNN's attention: its decode steps differ from run to run on an H200, enough to change greedy tokens (benchmarks/LOG.md)."""
    torch.backends.cuda.enable_cudnn_sdp(False)
