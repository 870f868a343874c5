"""Readers of option values: each takes what the shell, a YAML file or Python gives and returns the value of the option.

A reader raises ValueError with the reason alone; `Option.read` adds the option's name and the value.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from zero_inference.utils.format import did_you_mean, parse_gib

AUTO = "auto"
DTYPES = (AUTO, "float16", "bfloat16", "float32")
QUANT_BITS = (16, 8, 4)
SIZE_HELP = "a plain number is in GiB; 10GiB and 10G are 10 x 2^30 bytes, 10GB is 10 x 10^9"

_DTYPES = {"fp16": "float16", "f16": "float16", "half": "float16", "bf16": "bfloat16"}
_DTYPES |= dict.fromkeys(("fp32", "f32", "float", "single"), "float32")
_BITS = {form.format(bits): bits for bits in QUANT_BITS for form in ("{}", "{}bit", "{}-bit", "int{}", "uint{}", "q{}")}
_BITS |= dict.fromkeys(("fp16", "bf16", "float16", "bfloat16", "half", "none"), 16)
_QUANTIZED_TYPES = dict.fromkeys(("int8", "uint8", "8bit", "8-bit", "fp8", "float8"), 8)
_QUANTIZED_TYPES |= dict.fromkeys(("int4", "uint4", "nf4", "fp4", "4bit", "4-bit"), 4)


def flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("write true or false")
    return value


def zero_or_one(value: Any) -> bool:
    if str(value).lower() not in ("0", "1", "true", "false"):
        raise ValueError("choose one of 0, 1")
    return str(value).lower() in ("1", "true")


def whole_number(value: Any) -> int:
    try:
        return int(str(value))
    except ValueError:
        raise ValueError("not a whole number") from None


def number(value: Any) -> float:
    try:
        return float(str(value))
    except ValueError:
        raise ValueError("not a number") from None


def positive(value: Any) -> float:
    found = number(value)
    if not 0 < found < float("inf"):
        raise ValueError("must be a number above 0")
    return found


def share(value: Any) -> float:
    found = number(value)
    if not 0 < found < 1:
        raise ValueError("give a share between 0 and 1, such as 0.05")
    return found


def cpu_share(value: Any) -> str:
    """Return "auto", "off" or a share from 0 to 1, as text."""
    found = on_off(value)
    if found in (AUTO, "off"):
        return found
    try:
        valid = 0 <= float(found) <= 1
    except ValueError:
        valid = False
    if not valid:
        raise ValueError("choose auto, off, or a share of the weights between 0 and 1, such as 0.5")
    return found


def text(value: Any) -> str:
    if isinstance(value, (str, os.PathLike)):
        return os.fspath(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError("write one value, in quotes if it is text in YAML")
    return str(value)


def on_off(value: Any) -> str:
    """Return the text of `value`; true and false, which YAML reads for the words on and off, become these words again."""
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else text(value)


def texts(value: Any) -> tuple[str, ...]:
    found = (value,) if isinstance(value, str) else value
    if not isinstance(found, (list, tuple)) or not all(isinstance(each, str) for each in found):
        raise ValueError("write a text or a list of texts, in quotes in YAML")
    return tuple(found)


def names(value: Any) -> tuple[str, ...]:
    """Return the names of a list, or of a text with commas between them."""
    if isinstance(value, (list, tuple, set, range)):
        return tuple(map(text, value))
    if isinstance(value, Mapping):
        raise ValueError("write a list")
    found = tuple(name.strip() for name in text(value).split(",") if name.strip())
    if not found:
        raise ValueError("names nothing")
    return found


def whole_numbers(value: Any) -> tuple[int, ...]:
    return tuple(whole_number(name) for name in names(value))


def assignments(value: Any) -> str:
    """Return "name=value,...", which may be a mapping in Python: {"host": "128GiB"}."""
    return ",".join(f"{name}={part}" for name, part in value.items()) if isinstance(value, Mapping) else text(value)


def size(value: Any) -> float:
    """Return the GiB of a size such as 10GB or 512MiB."""
    return parse_gib(str(value))


def dtype(value: Any) -> str:
    """Return the name in DTYPES of a spelling such as fp16, half or torch.float16 (text or type); an unknown one as it is."""
    name = str(value).strip().lower().removeprefix("torch.")
    if bits := _QUANTIZED_TYPES.get(name):
        raise ValueError(
            f"products are computed in 16 or 32 bits. To store weights in {bits} bits, use --quant-bits {bits}"
        )
    return _DTYPES.get(name, name)


def bits(value: Any) -> Any:
    """Return 16, 8 or 4 for a spelling such as int4, 4bit or fp16; an unknown one as it is."""
    name = str(value).strip().lower()
    return _BITS.get(name, name)


# By the type of a field; other readers are named where the option is declared.
READERS: dict[str, Callable[[Any], Any]] = {
    "bool": flag,
    "bool | None": zero_or_one,
    "int": whole_number,
    "int | None": whole_number,
    "str": text,
    "str | None": text,
    "tuple[str, ...]": names,
    "tuple[int, ...]": whole_numbers,
}


def not_among(option: str, value: Any, allowed: tuple[Any, ...]) -> str:
    """Return the message for a value that is not allowed."""
    known = [str(each) for each in allowed if each is not None]
    near = did_you_mean(str(value), known)
    if near and len(known) > 12:  # such as columns
        return f"{option} {value}: {near}"
    return f"{option} {value}: choose one of {', '.join(known)}" + (f"; {near}" if near else ".")
