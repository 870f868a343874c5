"""Compare perplexity, logits and weights of smollm2-135m with its decoder layers in 16, 8 and 4 bits, in our formats and GGUF's.

python benchmarks/int4_quality.py [--tokens N] [--out FILE] [--head]        (a quarter of an hour on two cores, a third of it with --head)

The weights of the package are themselves rounded to 4 bits in groups of 32 along the columns (GGUF Q4_1), so a format with the
same groups gets them back almost exactly. In the `mixed` model no format has this advantage: its channels, the neurons of its
feed-forwards and the dimensions of its value heads are put into a random order, which changes no output. The text is Python's
own language reference (pydoc_data.topics), in windows that are scored alone.

`--head`: only our formats of the mixed model, with the output head in 16 and in 8 bits. Its weight is the embedding's, so it is copied.
"""

from __future__ import annotations

import argparse
import itertools
import math
import platform
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

WINDOW = 256  # tokens
SEED = 0
HEAD_FORMAT = "int8, groups of 64"
FORMATS_WITH_HEADS = ("bf16", HEAD_FORMAT, "int4, groups of 32 (default)")


def main() -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from zero_inference.models.built_in import smollm2_checkpoint

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=2048, help="of the text (default: 2048)")
    parser.add_argument("--out", type=Path, help="write the table here too")
    parser.add_argument("--head", action="store_true", help="with the output head in 16 and in 8 bits")
    args = parser.parse_args()

    lines: list[str] = []

    def show(*new: str) -> None:
        lines.extend(new)
        print(*new, sep="\n", flush=True)
        if args.out:
            args.out.write_text("\n".join(lines) + "\n")

    if not args.head:
        show(*random_errors())
    folder = smollm2_checkpoint()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = text_ids(AutoTokenizer.from_pretrained(folder), args.tokens)
    show(
        f"smollm2-135m, {ids.numel()} tokens of pydoc_data.topics (Python {platform.python_version()}) in windows of {WINDOW}",
        "weights: relative error of the matrices of all decoder layers together, least and most of one; logits: relative error",
        "perplexity with its standard error over windows; the last column is its ratio to 16 bits, in pairs of windows",
        "",
        "| channels | format | bits a weight | weights | least | most | logits | perplexity | to 16 bits |",
        "|---|---|---|---|---|---|---|---|---|",
    )
    published = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    round_head = next(rounding for name, _, rounding in formats() if name == HEAD_FORMAT)
    for channels in ("mixed",) if args.head else ("mixed", "as published"):
        if channels == "mixed":
            mix(model)
        else:
            model.load_state_dict(published, strict=False)
        weights_16bit = {name: weight.clone() for name, weight in matrices(model)}
        heads = {"": model.lm_head.weight.detach().clone()}
        if args.head:  # untied
            model.lm_head.weight = torch.nn.Parameter(heads[""].clone())
            heads[", head int8"] = round_head(heads[""])
        logits_16bit, loss_16bit = evaluate(model, ids)
        for (name, bits, rounding), head in itertools.product(formats(), heads):
            if args.head and name not in FORMATS_WITH_HEADS:
                continue
            if args.head:
                model.lm_head.weight.data = heads[head].clone()
            errors, norms = [], []
            for weight_name, weight in matrices(model):
                exact = weights_16bit[weight_name]
                with torch.no_grad():
                    weight.copy_(exact if rounding is None else rounding(exact))
                errors.append(float((weight - exact).norm()))
                norms.append(float(exact.norm()))
            logits, loss = (logits_16bit, loss_16bit) if rounding is None and not head else evaluate(model, ids)
            each = [error / norm for error, norm in zip(errors, norms)]
            together = math.hypot(*errors) / math.hypot(*norms)
            difference = loss - loss_16bit
            perplexity, ratio = loss.mean().exp(), difference.mean().exp()
            perplexity_stderr, ratio_stderr = (
                float(value) * float(samples.std()) / math.sqrt(len(samples))  # of exp of a mean
                for value, samples in ((perplexity, loss), (ratio, difference))
            )
            logits_error = float((logits - logits_16bit).norm() / logits_16bit.norm())
            show(
                f"| {channels} | {name}{head} | {bits:g} | {together:.2%} | {min(each):.2%} | {max(each):.2%} | "
                f"{logits_error:.2%} | {perplexity:.3f} ± {perplexity_stderr:.3f} | {ratio:.4f} ± {ratio_stderr:.4f} |"
            )


def random_errors() -> list[str]:
    """Return a table of the relative errors of random normal weights in all formats, and with the best of 400 clipped ranges."""
    import torch

    weight = torch.randn(1024, 1024, generator=torch.Generator().manual_seed(SEED)) * 0.02
    header = ["random normal weights, 1024 x 1024", "", "| format | error |", "|---|---|"]
    rows = [(name, rounding(weight)) for name, _, rounding in formats() if rounding is not None]
    for size in (64, 32):
        rows.append(
            (f"4 bits, groups of {size}, the best of 400 clipped ranges, each fitted twice", best_of_many(weight, size))
        )
    return [*header, *(f"| {name} | {float((each - weight).norm() / weight.norm()):.2%} |" for name, each in rows), ""]


def best_of_many(weight, size: int):
    """Return `weight` quantized to 4 bits by exhaustive search, with scales and minima in float32."""
    import torch

    values = weight.view(-1, size)
    low, high = values.aminmax(dim=1, keepdim=True)
    best, best_error = torch.zeros_like(values), torch.full_like(low, float("inf"))
    for below, above in itertools.product(range(20), repeat=2):
        minimum, top = low + (high - low) * 0.01 * below, high - (high - low) * 0.01 * above
        scale = (top - minimum) / 15
        for _ in range(2):
            codes = ((values - minimum) / scale).round_().clamp_(0, 15)
            centered = codes - codes.mean(1, keepdim=True)
            scale = (centered * values).sum(1, keepdim=True) / centered.square().sum(1, keepdim=True)
            minimum = values.mean(1, keepdim=True) - scale * codes.mean(1, keepdim=True)
        found = ((values - minimum) / scale).round_().clamp_(0, 15) * scale + minimum
        error = (found - values).square().sum(1, keepdim=True)
        best, best_error = torch.where(error < best_error, found, best), torch.minimum(error, best_error)
    return best.view_as(weight)


def formats() -> Iterator[tuple[str, float, Callable | None]]:
    """Yield the name, the bits of a stored weight with its scales, and the function that rounds a float32 weight (None: unchanged)."""
    import gguf
    import torch

    from zero_inference.cpu.products import quantize
    from zero_inference.kernels.quantization import GroupQuantization, dequantize

    def groups(bits: int, size: int):
        def rounded(weight: torch.Tensor) -> torch.Tensor:
            out = torch.empty_like(weight, dtype=torch.bfloat16)
            scheme = GroupQuantization(bits, size)
            dequantize(scheme.as_weight(*quantize(weight.bfloat16(), scheme)), out)
            return out.float()

        return rounded

    def of_gguf(kind: str):
        number = getattr(gguf.GGMLQuantizationType, kind)

        def rounded(weight: torch.Tensor) -> torch.Tensor:
            stored = gguf.quants.quantize(weight.numpy(), number)
            return torch.from_numpy(gguf.quants.dequantize(stored, number).copy())

        return rounded

    yield "bf16", 16, None
    yield "int8, groups of 64", 8.5, groups(8, 64)
    yield "int4, groups of 64", 4.5, groups(4, 64)
    yield "int4, groups of 32 (default)", 5, groups(4, 32)
    yield "GGUF Q4_0", 4.5, of_gguf("Q4_0")
    yield "GGUF Q4_1", 5, of_gguf("Q4_1")
    yield "GGUF Q4_K", 4.5, q4_k


def q4_k(weight):
    """Return `weight` rounded to GGUF's Q4_K, which the package gguf reads and does not write.

    Eight blocks of 32 have scales and minima of 6 bits, with a float16 factor for each of the two; minima are not above 0. Each block's
    are searched for and rounded, then its codes are chosen anew.

    Blocks continue across rows here; llama.cpp takes another format for rows that are no multiple of 256, as most of this model's.
    """
    import torch

    values = weight.reshape(-1, 8, 32)  # [super-blocks, blocks, columns]
    importance = values.square().mean(2, keepdim=True).sqrt() + values.abs()  # as llama.cpp weighs what it rounds
    low, high = values.amin(2, keepdim=True).clamp(max=0), values.amax(2, keepdim=True)
    best_error = torch.full_like(low, float("inf"))
    best_scale, best_minimum = torch.zeros_like(low), torch.zeros_like(low)
    total = importance.sum(2, keepdim=True)
    mean = (importance * values).sum(2, keepdim=True) / total
    for step in range(21):
        inverse = (15 - 1 + 0.1 * step) / (high - low).clamp(min=1e-30)
        codes = ((values - low) * inverse).round_().clamp_(0, 15)
        mean_code = (importance * codes).sum(2, keepdim=True) / total
        centered = codes - mean_code
        scale = (importance * centered * (values - mean)).sum(2, keepdim=True)
        scale = scale / (importance * centered.square()).sum(2, keepdim=True).clamp(min=1e-30)
        minimum = mean - scale * mean_code
        through_zero = (importance * codes * values).sum(2, keepdim=True)
        through_zero = through_zero / (importance * codes.square()).sum(2, keepdim=True).clamp(min=1e-30)
        scale, minimum = torch.where(minimum > 0, through_zero, scale), minimum.clamp(max=0)
        error = (importance * (codes * scale + minimum - values).square()).sum(2, keepdim=True)
        better = error < best_error
        best_error, best_scale, best_minimum = (
            torch.where(better, new, old)
            for new, old in ((error, best_error), (scale, best_scale), (minimum, best_minimum))
        )

    def six_bits(numbers):
        factor = (numbers.amax(1, keepdim=True) / 63).half().float()
        return factor * (numbers / factor.clamp(min=1e-30)).round_().clamp_(0, 63)

    scale, minimum = six_bits(best_scale.clamp(min=0)), six_bits(-best_minimum)
    codes = ((values + minimum) / scale.clamp(min=1e-30)).round_().clamp_(0, 15)
    return (codes * scale - minimum).view_as(weight)


def matrices(model) -> Iterator[tuple[str, object]]:
    """Yield names and weights that the stream engine quantizes: the linear layers of the decoder layers."""
    return ((name, weight) for name, weight in model.model.layers.named_parameters() if weight.dim() == 2)


def mix(model) -> None:
    """Put channels, neurons and value dimensions into a random order, in all weights that they belong to."""
    import torch

    generator = torch.Generator().manual_seed(SEED)
    config = model.config
    head_dim = config.hidden_size // config.num_attention_heads
    channels = torch.randperm(config.hidden_size, generator=generator)
    with torch.no_grad():
        for weight in (model.model.embed_tokens.weight, model.model.norm.weight):
            weight.copy_(weight[..., channels])
        for layer in model.model.layers:
            attention, mlp = layer.self_attn, layer.mlp
            neurons = torch.randperm(config.intermediate_size, generator=generator)
            orders = [torch.randperm(head_dim, generator=generator) for _ in range(config.num_key_value_heads)]
            values = torch.cat([index * head_dim + order for index, order in enumerate(orders)])
            groups = config.num_attention_heads // config.num_key_value_heads
            query_heads = range(config.num_attention_heads)
            attended = torch.cat([index * head_dim + orders[index // groups] for index in query_heads])
            for norm in (layer.input_layernorm, layer.post_attention_layernorm):
                norm.weight.copy_(norm.weight[channels])
            for linear in (attention.q_proj, attention.k_proj, attention.v_proj, mlp.gate_proj, mlp.up_proj):
                linear.weight.copy_(linear.weight[:, channels])
            attention.v_proj.weight.copy_(attention.v_proj.weight[values])
            attention.o_proj.weight.copy_(attention.o_proj.weight[channels][:, attended])
            for linear in (mlp.gate_proj, mlp.up_proj):
                linear.weight.copy_(linear.weight[neurons])
            mlp.down_proj.weight.copy_(mlp.down_proj.weight[channels][:, neurons])


def evaluate(model, ids):
    """Return the logits of the first window, and each window's mean negative log-likelihood of a token."""
    import torch

    losses, first = [], None
    with torch.no_grad():
        for window in ids:
            logits = model(window[None]).logits[0]
            first = logits if first is None else first
            losses.append(torch.nn.functional.cross_entropy(logits[:-1].double(), window[1:]))
    return first, torch.stack(losses)


def text_ids(tokenizer, tokens: int):
    """Return the ids of the text's first windows, int64 [windows, WINDOW]."""
    from pydoc_data.topics import topics

    import torch

    text = itertools.chain.from_iterable(tokenizer(topics[name]).input_ids for name in sorted(topics))
    ids = torch.tensor(list(itertools.islice(text, tokens // WINDOW * WINDOW)))
    return ids.view(-1, WINDOW)


if __name__ == "__main__":
    main()
