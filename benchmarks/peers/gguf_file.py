"""A GGUF file of a preset's dimensions with random weights, for llama.cpp's benchmarks: gpt-oss in MXFP4 and Q8_0, others in Q4_0.

The format: magic, version, metadata as typed keys and values, a table of tensors (name, dimensions, type, offset), and the data, each
tensor at a multiple of 32 bytes. A quantized tensor is made of blocks of 32 weights, each a scale and then the codes.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from zero_inference.models.weights import WEIGHT_STD, embedding_std

ALIGNMENT = 32
UINT32_VALUE, FLOAT32_VALUE, STRING_VALUE = 4, 6, 8  # types of metadata
CHUNK_BLOCKS = 1 << 21  # 34 to 68 MiB of random blocks, written again and again
WRITERS = 8  # threads: a virtual machine is slow to hand out memory for a file in /dev/shm
ARCHITECTURES = {
    "llama": "llama",
    "mixtral": "llama",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "gpt_oss": "gpt-oss",
}


class TensorType(NamedTuple):
    """A type of ggml: its name and number, and the weights and bytes of a block."""

    name: str
    number: int
    block_weights: int
    block_bytes: int


FLOAT32 = TensorType("F32", 0, 1, 4)
Q4_0 = TensorType("Q4_0", 2, 32, 18)  # a float16 scale, 16 bytes of two codes
Q8_0 = TensorType("Q8_0", 8, 32, 34)  # a float16 scale, 32 signed bytes
MXFP4 = TensorType("MXFP4", 39, 32, 17)  # the exponent of a scale (e8m0), 16 bytes of two codes (e2m1)
FILE_TYPES = {Q4_0: 2, MXFP4: 38}  # llama.cpp's number for a file whose weights are mostly of this type


class Tensor(NamedTuple):
    """A tensor of the file: its name, its dimensions with the contiguous one first, and its type."""

    name: str
    shape: tuple[int, ...]
    type: TensorType

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) // self.type.block_weights * self.type.block_bytes


def write_random_gguf(config: dict[str, Any], path: Path, seed: int = 0) -> int:
    """Write a model of the transformers `config` (a preset's) to `path`; returns the bytes of its tensors.

    Raises:
        ValueError: a model type that has no layout here, or a width that does not divide into blocks of 32.
    """
    if config["model_type"] not in ARCHITECTURES:
        raise ValueError(f"{config['model_type']}: no GGUF layout here; there is one for {', '.join(ARCHITECTURES)}")
    tensors = list(tensors_of(config))
    if odd := next((t for t in tensors if t.shape[0] % t.type.block_weights), None):
        raise ValueError(f"{odd.name}: rows of {odd.shape[0]} do not divide into blocks of {odd.type.block_weights}")
    blocks = {
        (of_type, std): memoryview(RANDOM_BLOCKS[of_type](CHUNK_BLOCKS, seed, std).reshape(-1))
        for of_type, std in {(t.type, std_of(t, config)) for t in tensors if t.type in RANDOM_BLOCKS}
    }
    header = header_of(metadata_of(config), tensors)
    with path.open("wb") as file, ThreadPoolExecutor(WRITERS) as writers:
        file.write(header)
        file.flush()
        for writing in [
            writers.submit(
                write_tensor,
                file.fileno(),
                tensor,
                len(header) + offset,
                blocks.get((tensor.type, std_of(tensor, config))),
                seed,
            )
            for tensor, offset in zip(tensors, offsets_of(tensors))
        ]:
            writing.result()
    return sum(tensor.nbytes for tensor in tensors)


def weight_type(config: dict[str, Any]) -> TensorType:
    """Return the type of most weights."""
    return MXFP4 if config["model_type"] == "gpt_oss" else Q4_0


def tensors_of(config: dict[str, Any]) -> Iterator[Tensor]:
    """The tensors in the order in which llama.cpp's converter writes them; gpt-oss in the types of ggml-org/gpt-oss-120b-GGUF."""
    hidden, inner, vocabulary = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    head = head_width(config)
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    experts = expert_count(config)
    inner = config.get("moe_intermediate_size", inner) if experts else inner
    gpt_oss = config["model_type"] == "gpt_oss"
    other_type = Q8_0 if gpt_oss else Q4_0  # of what is no expert

    def linear(name: str, shape: tuple[int, ...], weights: TensorType) -> Iterator[Tensor]:
        yield Tensor(name + ".weight", shape, weights)
        if gpt_oss:
            yield Tensor(name + ".bias", shape[1:], FLOAT32)

    yield Tensor("token_embd.weight", (hidden, vocabulary), other_type)
    for layer in range(config["num_hidden_layers"]):
        block = f"blk.{layer}."
        yield Tensor(block + "attn_norm.weight", (hidden,), FLOAT32)
        yield from linear(block + "attn_q", (hidden, queries), other_type)
        yield from linear(block + "attn_k", (hidden, keys), other_type)
        yield from linear(block + "attn_v", (hidden, keys), other_type)
        yield from linear(block + "attn_output", (queries, hidden), other_type)
        if config["model_type"].startswith("qwen3"):
            yield Tensor(block + "attn_q_norm.weight", (head,), FLOAT32)
            yield Tensor(block + "attn_k_norm.weight", (head,), FLOAT32)
        if gpt_oss:
            yield Tensor(block + "attn_sinks.weight", (config["num_attention_heads"],), FLOAT32)
        yield Tensor(block + ("post_attention_norm.weight" if gpt_oss else "ffn_norm.weight"), (hidden,), FLOAT32)
        stacked: tuple[int, ...] = (experts,) if experts else ()
        suffix = "_exps" if experts else ""
        if experts:  # llama.cpp's own quantizer leaves the router in float32
            yield from linear(block + "ffn_gate_inp", (hidden, experts), FLOAT32)
        yield from linear(block + "ffn_gate" + suffix, (hidden, inner, *stacked), weight_type(config))
        yield from linear(block + "ffn_up" + suffix, (hidden, inner, *stacked), weight_type(config))
        yield from linear(block + "ffn_down" + suffix, (inner, hidden, *stacked), weight_type(config))
    yield Tensor("output_norm.weight", (hidden,), FLOAT32)
    if not config.get("tie_word_embeddings"):
        yield Tensor("output.weight", (hidden, vocabulary), other_type)


def metadata_of(config: dict[str, Any]) -> dict[str, str | int | float]:
    """What llama.cpp's loader asks for; the tokenizer is none, and tokens are drawn from `vocab_size` numbers."""
    arch = ARCHITECTURES[config["model_type"]]
    values: dict[str, str | int | float] = {
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
        values |= {"expert_count": experts, "expert_used_count": config["num_experts_per_tok"]}
        values |= {"expert_feed_forward_length": config.get("moe_intermediate_size", config["intermediate_size"])}
    if config["model_type"] == "gpt_oss":  # that every second layer slides, from the first on, is in llama.cpp
        values["attention.sliding_window"] = config["sliding_window"]
        yarn = config["rope_scaling"]
        values |= {"rope.scaling.type": "yarn", "rope.scaling.factor": float(yarn["factor"])}
        values["rope.scaling.original_context_length"] = yarn["original_max_position_embeddings"]
        values |= {f"rope.scaling.yarn_{name}": float(yarn[name]) for name in ("beta_fast", "beta_slow")}
    return {
        "general.architecture": arch,
        "general.name": "random weights",
        "general.file_type": FILE_TYPES[weight_type(config)],
        "general.quantization_version": 2,
        "tokenizer.ggml.model": "none",
        **{f"{arch}.{name}": value for name, value in values.items()},
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
        out.append(struct.pack(f"<{len(tensor.shape)}QIQ", *tensor.shape, tensor.type.number, offset))
    header = b"".join(out)
    return header + bytes(-len(header) % ALIGNMENT)


def offsets_of(tensors: list[Tensor]) -> Iterator[int]:
    """Bytes from the begin of the data to each tensor."""
    offset = 0
    for tensor in tensors:
        yield offset
        offset += tensor.nbytes + -tensor.nbytes % ALIGNMENT


def random_q4_0(count: int, seed: int, std: float) -> np.ndarray:
    """Return `count` blocks, uint8 [count, 18]: weights of mean 0 and a deviation of about `std`.

    A mean other than 0, as code 0 would give, is a part that all tokens share and that grows from layer to layer.
    """
    random = np.random.default_rng(seed)
    low, high = random.integers(1, 16, (2, count, Q4_0.block_bytes), np.uint8)  # a weight is (code - 8) * scale
    blocks = low | high << 4
    blocks[:, :2] = random_scales(random, count, std)
    return blocks


def random_q8_0(count: int, seed: int, std: float) -> np.ndarray:
    """Return `count` blocks, uint8 [count, 34], as `random_q4_0`; a weight is code * scale, codes are -127 to 127."""
    random = np.random.default_rng(seed)
    blocks = random.integers(-127, 128, (count, Q8_0.block_bytes), np.int8).view(np.uint8)
    blocks[:, :2] = random_scales(random, count, std * 4.3 / 73.6)  # the deviation of the codes is 73.6 steps
    return blocks


def random_scales(random: np.random.Generator, count: int, std: float) -> np.ndarray:
    """Return float16 scales, uint8 [count, 2], for weights of deviation `std` whose codes have one of 4.3 steps."""
    scales = ((random.random(count, np.float32) * 0.1 + 0.18) * std).astype(np.float16)
    return scales.view(np.uint8).reshape(count, 2)


def random_mxfp4(count: int, seed: int, std: float) -> np.ndarray:
    """Return `count` blocks, uint8 [count, 17], as `random_q4_0`; a weight is the number of its code * 2 ** (byte 0 - 127)."""
    random = np.random.default_rng(seed)
    blocks = random.integers(0, 256, (count, MXFP4.block_bytes), np.uint8)
    fraction, exponent = math.modf(127 + math.log2(std / 2.93))  # the deviation of the codes is 2.93
    larger = (4**fraction - 1) / 3  # the share of the next power of 2 with which the mean square of the scales is right
    blocks[:, 0] = int(exponent) + (random.random(count, np.float32) < larger)
    return blocks


RANDOM_BLOCKS: dict[TensorType, Callable[[int, int, float], np.ndarray]] = {
    Q4_0: random_q4_0,
    Q8_0: random_q8_0,
    MXFP4: random_mxfp4,
}


def embedding_std_of(config: dict[str, Any]) -> float:
    """Return the deviation of the embeddings, for mixtures that of `--dummy-routing text`: equal use of experts on both sides."""
    if not expert_count(config):
        return WEIGHT_STD
    return embedding_std(SimpleNamespace(**config))


def std_of(tensor: Tensor, config: dict[str, Any]) -> float:
    return embedding_std_of(config) if tensor.name == "token_embd.weight" else WEIGHT_STD


def float32_values(tensor: Tensor, seed: int) -> np.ndarray:
    """Ones for a norm; random for a router, so that tokens and layers choose different experts, for biases and for sinks."""
    if tensor.name.endswith("norm.weight"):
        return np.ones(tensor.nbytes // 4, np.float32)
    return np.random.default_rng([seed, *tensor.name.encode()]).standard_normal(tensor.nbytes // 4, np.float32) * 0.02


def write_tensor(file: int, tensor: Tensor, offset: int, blocks: memoryview | None, seed: int) -> None:
    """Write a tensor's bytes at `offset`: those of the blocks, from the first again after the last, or float32 values."""
    data = memoryview(float32_values(tensor, seed).view(np.uint8)) if blocks is None else blocks
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
