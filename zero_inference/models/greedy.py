"""What greedy generation is in this project: one place, so that every run and every comparison selects tokens alike."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import GenerationConfig


def greedy(new_tokens: int) -> GenerationConfig:
    """Settings of `generate` for `new_tokens` tokens, each the likeliest, with a KV cache.

    Row lengths are equal everywhere in this project, so the padding token is never seen. What is left open here `generate` takes
    from the model: see `drop_own_settings`.
    """
    from transformers import GenerationConfig

    return GenerationConfig(max_new_tokens=new_tokens, do_sample=False, num_beams=1, use_cache=True, pad_token_id=0)


def drop_own_settings(model) -> None:
    """Take the checkpoint's sampling, forced tokens and stop words from `model`: they would change how much is generated and what."""
    from transformers import GenerationConfig

    model.generation_config = GenerationConfig()


def use_repeatable_attention() -> None:
    """Take cuDNN's attention out of PyTorch's choice.

    Its decode step is not repeatable on an H200: float16 logits differed from run to run, enough to change greedy tokens
    (docs/performance.md).
    """
    import torch

    torch.backends.cuda.enable_cudnn_sdp(False)
