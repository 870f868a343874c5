"""A GGUF file of a preset's dimensions with random weights in Q4_0, for llama.cpp's benchmarks.

The format: magic, version, metadata as typed keys and values, a table of tensors (name, dimensions, type, offset), and the data, each
tensor at a multiple of 32 bytes. A block of Q4_0 holds 32 weights: a float16 scale and 16 bytes of two weights each, 4.5 bits a weight.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from zero_inference.models.weights import WEIGHT_STD, embedding_std

ALIGNMENT = 32
BLOCK_WEIGHTS, BLOCK_BYTES = 32, 18
FLOAT32, Q4_0 = 0, 2  # types of tensors
UINT32_VALUE, FLOAT32_VALUE, STRING_VALUE = 4, 6, 8  # types of metadata
CHUNK_BLOCKS = 1 << 21  # 36 MiB of random blocks, written again and again
WRITERS = 8  # threads: a virtual machine is slow to hand out memory for a file in /dev/shm
ARCHITECTURES = {"llama": "llama", "mixtral": "llama", "qwen3": "qwen3", "qwen3_moe": "qwen3moe"}


class Tensor(NamedTuple):
    """A tensor of the file: its name, dimensions with the contiguous one first, and FLOAT32 or Q4_0."""

    name: str
    shape: tuple[int, ...]
    type: int

    @property
    def nbytes(self) -> int:
        elements = int(np.prod(self.shape, dtype=np.int64))
        return elements // BLOCK_WEIGHTS * BLOCK_BYTES if self.type == Q4_0 else 4 * elements


def write_random_gguf(config: dict[str, Any], path: Path, seed: int = 0) -> int:
    """Write a model of the transformers `config` (a preset's) to `path`; returns the bytes of its tensors.

    Raises:
        ValueError: a model type that has no layout here, or a width that does not divide into blocks of 32.
    """
    if config["model_type"] not in ARCHITECTURES:
        raise ValueError(f"{config['model_type']}: no GGUF layout here; there is one for {', '.join(ARCHITECTURES)}")
    tensors = list(tensors_of(config))
    if odd := next((t for t in tensors if t.type == Q4_0 and t.shape[0] % BLOCK_WEIGHTS), None):
        raise ValueError(f"{odd.name}: rows of {odd.shape[0]} do not divide into blocks of {BLOCK_WEIGHTS}")
    blocks = {
        std: memoryview(random_blocks(CHUNK_BLOCKS, seed, std).reshape(-1))
        for std in {WEIGHT_STD, embedding_std_of(config)}
    }
    header = header_of(metadata_of(config), tensors)
    with path.open("wb") as file, ThreadPoolExecutor(WRITERS) as writers:
        file.write(header)
        file.flush()
        for writing in [
            writers.submit(
                write_tensor, file.fileno(), tensor, len(header) + offset, blocks[std_of(tensor, config)], seed
            )
            for tensor, offset in zip(tensors, offsets_of(tensors))
        ]:
            writing.result()
    return sum(tensor.nbytes for tensor in tensors)


def tensors_of(config: dict[str, Any]) -> Iterator[Tensor]:
    """The tensors in the order in which llama.cpp's converter writes them."""
    hidden, inner, vocabulary = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    head = head_width(config)
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    experts = expert_count(config)
    inner = config.get("moe_intermediate_size", inner) if experts else inner
    yield Tensor("token_embd.weight", (hidden, vocabulary), Q4_0)
    for layer in range(config["num_hidden_layers"]):
        block = f"blk.{layer}."
        yield Tensor(block + "attn_norm.weight", (hidden,), FLOAT32)
        yield Tensor(block + "attn_q.weight", (hidden, queries), Q4_0)
        yield Tensor(block + "attn_k.weight", (hidden, keys), Q4_0)
        yield Tensor(block + "attn_v.weight", (hidden, keys), Q4_0)
        yield Tensor(block + "attn_output.weight", (queries, hidden), Q4_0)
        if config["model_type"].startswith("qwen3"):
            yield Tensor(block + "attn_q_norm.weight", (head,), FLOAT32)
            yield Tensor(block + "attn_k_norm.weight", (head,), FLOAT32)
        yield Tensor(block + "ffn_norm.weight", (hidden,), FLOAT32)
        stacked: tuple[int, ...] = (experts,) if experts else ()
        suffix = "_exps.weight" if experts else ".weight"
        if experts:  # llama.cpp's own quantizer leaves the router in float32
            yield Tensor(block + "ffn_gate_inp.weight", (hidden, experts), FLOAT32)
        yield Tensor(block + "ffn_gate" + suffix, (hidden, inner, *stacked), Q4_0)
        yield Tensor(block + "ffn_up" + suffix, (hidden, inner, *stacked), Q4_0)
        yield Tensor(block + "ffn_down" + suffix, (inner, hidden, *stacked), Q4_0)
    yield Tensor("output_norm.weight", (hidden,), FLOAT32)
    if not config.get("tie_word_embeddings"):
        yield Tensor("output.weight", (hidden, vocabulary), Q4_0)


def metadata_of(config: dict[str, Any]) -> dict[str, str | int | float]:
    """What llama.cpp's loader asks for; the tokenizer is none, and tokens are drawn from `vocab_size` numbers."""
    arch = ARCHITECTURES[config["model_type"]]
    sizes: dict[str, int | float] = {
        "vocab_size": config["vocab_size"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "rope.dimension_count": head_width(config),
        "rope.freq_base": float(config.get("rope_theta", 10000.0)),
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": head_width(config),
        "attention.value_length": head_width(config),
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
    }
    if experts := expert_count(config):
        sizes |= {"expert_count": experts, "expert_used_count": config["num_experts_per_tok"]}
        sizes |= {"expert_feed_forward_length": config.get("moe_intermediate_size", config["intermediate_size"])}
    return {
        "general.architecture": arch,
        "general.name": "random weights",
        "general.file_type": 2,  # most tensors in Q4_0
        "general.quantization_version": 2,
        "tokenizer.ggml.model": "none",
        **{f"{arch}.{name}": value for name, value in sizes.items()},
    }


def header_of(metadata: dict[str, str | int | float], tensors: list[Tensor]) -> bytes:
    """Everything before the data, padded to where the first tensor begins."""
    out = [b"GGUF", struct.pack("<IQQ", 3, len(tensors), len(metadata))]
    for key, value in metadata.items():
        out.append(_string(key))
        if isinstance(value, str):
            out += [struct.pack("<I", STRING_VALUE), _string(value)]
        elif isinstance(value, float):
            out.append(struct.pack("<If", FLOAT32_VALUE, value))
        else:
            out.append(struct.pack("<II", UINT32_VALUE, value))
    for tensor, offset in zip(tensors, offsets_of(tensors)):
        out += [_string(tensor.name), struct.pack("<I", len(tensor.shape))]
        out.append(struct.pack(f"<{len(tensor.shape)}QIQ", *tensor.shape, tensor.type, offset))
    header = b"".join(out)
    return header + bytes(-len(header) % ALIGNMENT)


def offsets_of(tensors: list[Tensor]) -> Iterator[int]:
    """Bytes from the begin of the data to each tensor."""
    offset = 0
    for tensor in tensors:
        yield offset
        offset += tensor.nbytes + -tensor.nbytes % ALIGNMENT


def random_blocks(count: int, seed: int, std: float = WEIGHT_STD) -> np.ndarray:
    """Return `count` blocks of Q4_0, uint8 [count, 18]: weights of mean 0 and a deviation of about `std`.

    A mean other than 0, as code 0 would give, is a part that all tokens share and that grows from layer to layer.
    """
    random = np.random.default_rng(seed)
    low, high = random.integers(1, 16, (2, count, BLOCK_BYTES), np.uint8)  # a weight is (code - 8) * scale
    blocks = low | high << 4
    # the deviation of the codes is 4.3 steps
    scales = ((random.random(count, np.float32) * 0.1 + 0.18) * std).astype(np.float16)
    blocks[:, :2] = scales.view(np.uint8).reshape(count, 2)
    return blocks


def embedding_std_of(config: dict[str, Any]) -> float:
    """Return the deviation of the embeddings, for mixtures that of `--dummy-routing text`: equal use of experts on both sides."""
    if not expert_count(config):
        return WEIGHT_STD
    return embedding_std(SimpleNamespace(**config))


def std_of(tensor: Tensor, config: dict[str, Any]) -> float:
    return embedding_std_of(config) if tensor.name == "token_embd.weight" else WEIGHT_STD


def norm_or_router(tensor: Tensor, seed: int) -> np.ndarray:
    """Ones for a norm; random for a router, so that tokens and layers choose different experts."""
    if len(tensor.shape) == 1:
        return np.ones(tensor.shape, np.float32)
    return np.random.default_rng([seed, *tensor.name.encode()]).standard_normal(tensor.nbytes // 4, np.float32) * 0.02


def write_tensor(file: int, tensor: Tensor, offset: int, blocks: memoryview, seed: int) -> None:
    """Write a tensor's bytes at `offset`: of Q4_0 those of the blocks, from the first again after the last."""
    data = blocks if tensor.type == Q4_0 else memoryview(norm_or_router(tensor, seed).reshape(-1).view(np.uint8))
    for begin in range(0, tensor.nbytes, len(data)):
        write_at(file, data[: min(len(data), tensor.nbytes - begin)], offset + begin)


def write_at(file: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(file, data, offset)
        data, offset = data[written:], offset + written


def head_width(config: dict[str, Any]) -> int:
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def expert_count(config: dict[str, Any]) -> int:
    """0 where the layers are dense."""
    return config.get("num_local_experts") or config.get("num_experts") or 0


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()
