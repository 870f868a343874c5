"""Other spellings of a choice, and the one under which it is known."""

from __future__ import annotations

from typing import Any

from zero_inference.config.choices import AUTO, DTYPES, QUANT_BITS
from zero_inference.errors import UsageError
from zero_inference.runtime.near import did_you_mean

_DTYPES = {
    **{name: name for name in DTYPES},
    **dict.fromkeys(("fp16", "f16", "half"), "float16"),
    **dict.fromkeys(("bf16",), "bfloat16"),
    **dict.fromkeys(("fp32", "f32", "float", "single"), "float32"),
}
_BITS = {
    **{str(bits): bits for bits in QUANT_BITS},
    **{form.format(bits): bits for bits in QUANT_BITS for form in ("{}bit", "{}-bit", "{}bits", "{}-bits")},
    **{form.format(bits): bits for bits in (8, 4) for form in ("int{}", "uint{}", "q{}")},
    **dict.fromkeys(("fp16", "bf16", "float16", "bfloat16", "half", "none"), 16),
}
MOST_LISTED = 12  # choices, beside a near one
_STORED = {8: ("int8", "uint8", "8bit", "8-bit"), 4: ("int4", "uint4", "nf4", "fp4", "4bit", "4-bit")}


def dtype_name(said: Any) -> str:
    """auto, float16, bfloat16 or float32 for one of its spellings, such as fp16, half or torch.float16 (the text or the type itself).

    Raises:
        UsageError: it is none of them; one that stands for quantized weights is told about --quant-bits.
    """
    name = str(said).strip().lower().removeprefix("torch.")
    if name in _DTYPES:
        return _DTYPES[name]
    for bits, names in _STORED.items():
        if name in names:
            raise UsageError(
                f"--dtype {said}: this is the type that products are computed in. To store weights in {bits} bits, "
                f"use --quant-bits {bits}."
            )
    if name.startswith(("fp8", "float8", "e4m3", "e5m2")):
        raise UsageError(
            f"--dtype {said}: products are computed in float16, bfloat16 or float32. A checkpoint in fp8 is read as it is; "
            "to store weights in 8 bits, use --quant-bits 8."
        )
    raise UsageError(not_among("--dtype", said, DTYPES))


def bits_of(said: Any, allowed: tuple[Any, ...] = (*QUANT_BITS, AUTO)) -> Any:
    """One of `allowed` (16, 8, 4, auto) for one of its spellings, such as int4, 4bit or fp16.

    Raises:
        UsageError: it is none of them.
    """
    name = str(said).strip().lower()
    bits = AUTO if name == AUTO else _BITS.get(name)
    if bits not in allowed:
        raise UsageError(not_among("--quant-bits", said, allowed))
    return bits


def not_among(option: str, said: Any, allowed: tuple[Any, ...]) -> str:
    """The sentence for a value that is none of those allowed."""
    names = [str(each) for each in allowed if each is not None]
    near = did_you_mean(str(said), names)
    if near and len(names) > MOST_LISTED:
        return f"{option} {said}: {near}"
    return f"{option} {said}: choose one of {', '.join(names)}" + (f"; {near}" if near else ".")
