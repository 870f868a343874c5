"""Blocks of well-known models (transformers' modules with random weights), their parts, and their operations.

The classical block (Vaswani et al. 2017: one head size for queries, keys and values, an inner layer of 4 h) needs
`24 b s h^2 + 4 b h s^2` operations for b sequences of s tokens and hidden size h; `BlockShape` has the sums for any widths. Only
products count, a multiplication and an addition as two, as in `torch.utils.flop_counter`, and causal attention counts in full.

Dimensions are the published ones: bert-large (Devlin et al. 2018), gpt2-medium (Radford et al. 2019), t5-large's encoder (Raffel et al.
2020), and the presets of this package for the others.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from zero_inference.errors import UsageError
from zero_inference.models.preset_table import find_preset
from zero_inference.utils.model_sizes import kv_width


@dataclass(frozen=True)
class BlockShape:
    """Widths of a block.

    Attributes:
        hidden: h, of the input and the output.
        query: all query heads together, `heads * head_dim`.
        key: all key heads together; less than `query` with grouped queries. Values are as wide.
        inner: of the feed-forward part.
        matrices: of the feed-forward part: 2, or 3 with a gate.
        causal: whether a token sees only those before it.
    """

    hidden: int
    query: int
    key: int
    inner: int
    matrices: int = 2
    causal: bool = False

    def operations(self, part: str, b: int, s: int) -> int:
        """Return the operations of a part of `Block.parts` for b sequences of s tokens."""
        dense = 2 * b * s * self.hidden * self.inner  # 8 b s h^2 in the classical block
        projections = 2 * b * s * self.hidden * (2 * self.query + 2 * self.key)  # 8 b s h^2
        attention = projections + 4 * b * self.query * s**2  # and the scores, 4 b h s^2
        feed_forward = self.matrices * dense
        counts = {"dense": dense, "dense_activation": dense, "feed_forward": feed_forward, "attention": attention}
        return (counts | {"layer": attention + feed_forward})[part]

    def skippable(self, b: int, s: int) -> float:
        """Return the share of a layer that a causal kernel may skip: scores of `s (s - 1) / 2` pairs of `s^2`; 0 if not causal."""
        return 2 * b * self.query * s * (s - 1) / self.operations("layer", b, s) if self.causal else 0.0


Call = Callable[[torch.Tensor], torch.Tensor]
BERT_LARGE = dict(model_type="bert", hidden_size=1024, num_attention_heads=16, intermediate_size=4096)
GPT2_MEDIUM = dict(model_type="gpt2", n_embd=1024, n_head=16, n_layer=24)
T5_LARGE = dict(model_type="t5", d_model=1024, d_kv=64, d_ff=4096, num_heads=16, num_layers=24)


@dataclass(frozen=True)
class Block:
    """A block and its parts; each part takes hidden states [batch, seq, hidden] of the block's dtype and device.

    Attributes:
        family: transformers' model_type, which the module of a block does not have.
        module: the whole block, in eval mode (no dropout), its parameters requiring gradients.
        parts: `layer`, `attention`, `feed_forward`, `dense` (the first matrix of the feed-forward part), `dense_activation`.
    """

    name: str
    family: str
    shape: BlockShape
    module: nn.Module
    parts: dict[str, Call]


def _bert(config) -> tuple[nn.Module, dict[str, Call]]:
    from transformers.models.bert.modeling_bert import BertLayer

    block = BertLayer(config, layer_idx=1)
    return block, {
        "layer": block,
        "attention": lambda x: block.attention(x)[0],
        "feed_forward": block.feed_forward_chunk,
        "dense": block.intermediate.dense,
        "dense_activation": block.intermediate,
    }


def _gpt2(config) -> tuple[nn.Module, dict[str, Call]]:
    from transformers.models.gpt2.modeling_gpt2 import GPT2Block

    block = GPT2Block(config, layer_idx=1)
    mlp = block.mlp
    return block, {
        "layer": block,
        "attention": lambda x: block.attn(x)[0],
        "feed_forward": mlp,
        "dense": mlp.c_fc,
        "dense_activation": lambda x: mlp.act(mlp.c_fc(x)),
    }


def _t5(config) -> tuple[nn.Module, dict[str, Call]]:
    from transformers.models.t5.modeling_t5 import T5Block

    block = T5Block(config, layer_idx=1)
    inner = block.layer[-1].DenseReluDense

    @functools.cache
    def bias(seq: int) -> torch.Tensor:  # blocks after the first get the first one's position bias
        weight = inner.wi.weight
        return torch.randn(1, config.num_heads, seq, seq, device=weight.device, dtype=weight.dtype)

    return block, {
        "layer": lambda x: block(x, position_bias=bias(x.shape[1]))[0],
        "attention": lambda x: block.layer[0](x, position_bias=bias(x.shape[1]))[0],
        "feed_forward": block.layer[-1],
        "dense": inner.wi,
        "dense_activation": lambda x: inner.act(inner.wi(x)),
    }


def _opt(config) -> tuple[nn.Module, dict[str, Call]]:
    from transformers.models.opt.modeling_opt import OPTDecoderLayer

    block = OPTDecoderLayer(config, layer_idx=1)
    return block, {
        "layer": block,
        "attention": lambda x: block.self_attn(x)[0],
        "feed_forward": lambda x: block.fc2(block.activation_fn(block.fc1(x))),
        "dense": block.fc1,
        "dense_activation": lambda x: block.activation_fn(block.fc1(x)),
    }


def _llama(config) -> tuple[nn.Module, dict[str, Call]]:
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

    block, rotary = LlamaDecoderLayer(config, layer_idx=1), LlamaRotaryEmbedding(config)
    mlp = block.mlp

    @functools.cache
    def angles(seq: int):  # computed once a model, not once a block
        weight = mlp.gate_proj.weight
        return rotary(weight, torch.arange(seq, device=weight.device)[None])

    return block, {
        "layer": lambda x: block(x, position_embeddings=angles(x.shape[1])),
        "attention": lambda x: block.self_attn(x, position_embeddings=angles(x.shape[1]))[0],
        "feed_forward": mlp,
        "dense": mlp.gate_proj,
        "dense_activation": lambda x: mlp.act_fn(mlp.gate_proj(x)),
    }


# model_type -> function that builds the block, and whether its attention is causal.
FAMILIES: dict[str, tuple[Callable, bool]] = {
    "bert": (_bert, False),
    "gpt2": (_gpt2, True),
    "t5": (_t5, False),
    "opt": (_opt, True),
    "llama": (_llama, True),
}
OWN = {"bert-large": BERT_LARGE, "gpt2-medium": GPT2_MEDIUM, "t5-large": T5_LARGE}
SHORT = {"opt": "opt-13b", "llama": "llama-3.1-8b"}
DEFAULT_BLOCKS = ("bert-large", "gpt2-medium", "t5-large", "opt-13b", "llama-3.1-8b")
CPU_BLOCKS = (*DEFAULT_BLOCKS[:3], "opt-1.3b", "llama-3.2-1b")  # a step of opt-13b takes seconds there


def block_config(name: str):
    """Return the transformers config of block `name`. Raises UsageError for a name that is no block."""
    from transformers import AutoConfig

    name = SHORT.get(name, name)
    if name in OWN:
        return AutoConfig.for_model(**OWN[name])
    preset = find_preset(name)
    if preset is None or preset.config["model_type"] not in FAMILIES:
        raise UsageError(
            f"--blocks {name}: there is no such block; take {', '.join((*DEFAULT_BLOCKS, *SHORT))}, "
            "or a preset of the OPT and Llama families."
        )
    return preset.to_config()


def shape_of(config) -> BlockShape:
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    names = ("intermediate_size", "ffn_dim", "d_ff", "n_inner")
    inner = next(
        (size for name in names if isinstance(size := getattr(config, name, None), int)), 4 * config.hidden_size
    )
    return BlockShape(
        hidden=config.hidden_size,
        query=heads * width,
        key=kv_width(config),
        inner=inner,
        matrices=3 if config.model_type == "llama" else 2,
        causal=FAMILIES[config.model_type][1],
    )


def build_block(name: str, device: torch.device, dtype: torch.dtype, config=None, seed: int = 0) -> Block:
    """Return block `name` with seeded random weights on `device` in `dtype`; `config` replaces that of the name."""
    config = config if config is not None else block_config(name)
    config._attn_implementation = "sdpa"  # what from_pretrained chooses for all of these families
    torch.manual_seed(seed)
    make, _ = FAMILIES[config.model_type]
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)  # an opt-175b block in float32 first would need twice the memory
    try:
        with torch.device(device):
            module, parts = make(config)
    finally:
        torch.set_default_dtype(before)
    return Block(name, config.model_type, shape_of(config), module.eval(), parts)
