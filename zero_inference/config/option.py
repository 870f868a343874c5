"""Option: one declaration that gives the shell option, the YAML key, the Python keyword, their check and their documentation.

A reader returns the value of an option for what the shell, a YAML file or Python gives. It raises ValueError with the reason alone;
`Option.read` adds the option's name and the value.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from zero_inference.errors import UsageError
from zero_inference.utils.format import did_you_mean, parse_gib

MAX_COUNT = 2**31 - 1
AUTO, ALL = "auto", "all"
DTYPES = (AUTO, "float16", "bfloat16", "float32")
QUANT_BITS = (16, 8, 4)
STORED = "stored"  # as the checkpoint has them, which may be quantized
SIZE_HELP = "a plain number is in GiB; 10GiB and 10G are 10 x 2^30 bytes, 10GB is 10 x 10^9"

_DTYPE_OF = {"fp16": "float16", "f16": "float16", "half": "float16", "bf16": "bfloat16"}
_DTYPE_OF |= dict.fromkeys(("fp32", "f32", "float", "single"), "float32")
_BITS = {form.format(bits): bits for bits in QUANT_BITS for form in ("{}", "{}bit", "{}-bit", "int{}", "uint{}", "q{}")}
_BITS |= dict.fromkeys(("fp16", "bf16", "float16", "bfloat16", "half", "none"), 16)
_QUANTIZED_BITS = dict.fromkeys(("int8", "uint8", "8bit", "8-bit", "fp8", "float8"), 8)
_QUANTIZED_BITS |= dict.fromkeys(("int4", "uint4", "nf4", "fp4", "4bit", "4-bit"), 4)


def read_flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("write true or false")
    return value


def read_zero_or_one(value: Any) -> bool:
    if str(value).lower() not in ("0", "1", "true", "false"):
        raise ValueError("choose one of 0, 1")
    return str(value).lower() in ("1", "true")


def read_int(value: Any) -> int:
    try:
        return int(str(value))
    except ValueError:
        raise ValueError("not a whole number") from None


def read_float(value: Any, above: float, below: float = math.inf) -> float:
    try:
        found = float(str(value))
    except ValueError:
        raise ValueError("not a number") from None
    if not above < found < below:
        raise ValueError(f"must be a number above {above}" + f" and below {below}" * (below < math.inf))
    return found


def read_gpus(value: Any) -> int | str:
    """Return "all" or a number of at least 1."""
    if str(value).strip().lower() == ALL:
        return ALL
    text = str(value).strip()
    if isinstance(value, bool) or not text.isdecimal() or not 1 <= int(text) <= MAX_COUNT:
        raise ValueError("choose all, or a number of at least 1")
    return int(text)


def read_count_or_auto(value: Any) -> int | str:
    """Return "auto" or a whole number."""
    return AUTO if str(value).strip().lower() == AUTO else read_int(value)


def read_cpu_share(value: Any) -> str:
    """Return "auto", "off" or a share from 0 to 1, as text."""
    found = read_word(value)
    try:
        valid = found in (AUTO, "off") or 0 <= float(found) <= 1
    except ValueError:
        valid = False
    if not valid:
        raise ValueError("choose auto, off, or a share of the weights between 0 and 1, such as 0.5")
    return found


def read_text(value: Any) -> str:
    if isinstance(value, (str, os.PathLike)):
        return os.fspath(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError("write one value, in quotes if it is text in YAML")
    return str(value)


def read_word(value: Any) -> str:
    """Return the text of `value`; true and false, which YAML reads for the words on and off, become these words again."""
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else read_text(value)


def read_texts(value: Any) -> tuple[str, ...]:
    found = (value,) if isinstance(value, str) else value
    if not isinstance(found, (list, tuple)) or not all(isinstance(each, str) for each in found):
        raise ValueError("write a text or a list of texts, in quotes in YAML")
    return tuple(found)


def read_names(value: Any) -> tuple[str, ...]:
    """Return the names of a list, or of a text with commas between them."""
    if isinstance(value, (list, tuple, set, range)):
        return tuple(map(read_text, value))
    if isinstance(value, Mapping):
        raise ValueError("write a list")
    found = tuple(name.strip() for name in read_text(value).split(",") if name.strip())
    if not found:
        raise ValueError("names nothing")
    return found


def read_assignments(value: Any) -> str:
    """Return "name=value,...", which may be a mapping in Python: {"host": "128GiB"}."""
    return (
        ",".join(f"{name}={part}" for name, part in value.items()) if isinstance(value, Mapping) else read_text(value)
    )


def read_dtype(value: Any) -> str:
    """Return the name in DTYPES of a spelling such as fp16, half or torch.float16 (text or type); an unknown one as it is."""
    name = str(value).strip().lower().removeprefix("torch.")
    if bits := _QUANTIZED_BITS.get(name):
        raise ValueError(
            f"products are computed in 16 or 32 bits. To store weights in {bits} bits, use --quant-bits {bits}"
        )
    return _DTYPE_OF.get(name, name)


def read_bits(value: Any) -> Any:
    """Return 16, 8 or 4 for a spelling such as int4, 4bit or fp16; "stored" or an unknown one as it is."""
    name = str(value).strip().lower()
    return _BITS.get(name, name)


# By kind of option: the type of its field, or another that the declaration names.
READERS: dict[str, Callable[[Any], Any]] = {
    "bool": read_flag,
    "bool | None": read_zero_or_one,
    "int": read_int,
    "int | None": read_int,
    "str": read_text,
    "str | None": read_text,
    "tuple[str, ...]": read_names,
    "tuple[int, ...]": lambda value: tuple(map(read_int, read_names(value))),
    "assignments": read_assignments,
    "bits": read_bits,
    "count or auto": read_count_or_auto,
    "cpu share": read_cpu_share,
    "draft": lambda value: None if read_text(value) == "off" else read_text(value),
    "dtype": read_dtype,
    "gpus": read_gpus,
    "positive": partial(read_float, above=0),
    "share": partial(read_float, above=0, below=1),
    "size": lambda value: parse_gib(str(value)),
    "texts": read_texts,
    "word": read_word,
}


@dataclass(frozen=True)
class Option:
    """One option of a command.

    Attributes:
        name: keyword and attribute; the shell option and the YAML key have hyphens.
        help: without the default, which is added.
        group: title of its group in --help.
        kind: a key of `READERS`.
        metavar: the value in --help; "" is derived from the other attributes.
        choices: allowed values, or allowed elements of a list.
        least, most: bounds of a number.
        default_help: the default in words.
        path: "path" for a file or folder, "home" where ~ is expanded; "" for other values.
        engines: engines that have it; () for all.
        needs: options without which it has no effect; "quality=humaneval" needs that task among those of --quality.
        until_planned: the value in place of `auto` until the plan has found one; None where auto is no value.
        of_load: `load` has a keyword of its name.
        repeated: typed once for each element of its list.
    """

    name: str
    default: Any
    help: str
    group: str = ""
    kind: str = "str"
    metavar: str = ""
    choices: tuple[Any, ...] = ()
    least: float | None = None
    most: float = MAX_COUNT
    default_help: str | None = None
    path: str = ""
    engines: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    until_planned: Any = None
    of_load: bool = False
    repeated: bool = False

    @property
    def flag(self) -> str:
        return "--" + hyphens(self.name)

    @property
    def allowed(self) -> tuple[Any, ...]:
        return (*self.choices, AUTO) if self.until_planned is not None else self.choices

    def read(self, value: Any, shown_as: str = "", auto: bool = True) -> Any:
        """Return the value of the option for `value`, from the shell, YAML or Python.

        Args:
            shown_as: the option's name in messages; its flag by default.
            auto: whether `auto` is a value of options that can be planned.

        Raises:
            UsageError: the option cannot have this value.
        """
        name, planned = shown_as or self.flag, auto and self.until_planned is not None
        if planned and str(value).strip().lower() == AUTO:
            return AUTO
        try:
            found = READERS[self.kind](value)
        except ValueError as error:
            shown = str(value).lower() if isinstance(value, bool) else f"{value!s:.80}" or repr("")
            raise UsageError(f"{name} {shown}: {error}{' or auto' * planned}.") from None
        for each in found if isinstance(found, tuple) else (found,):
            if self.choices and each not in self.choices:
                raise UsageError(not_among(name, each, self.allowed if auto else self.choices))
        if self.least is not None and found != AUTO and not self.least <= found <= self.most:
            bound = f"most {self.most}" if found > self.most else f"least {self.least}"
            raise UsageError(f"{name} {found}: must be at {bound}.")
        if self.path and not found:  # an unset variable of a script
            raise UsageError(f"{name} is empty: give it a name, or drop it.")
        if self.path and (os.path.expanduser(found) if self.path == "home" else found).startswith("~"):
            # a folder called ~ is one that people remove with their home
            raise UsageError(f"{name} {found}: this ~ is not expanded to a home folder; write it out, or ./{found}.")
        return found

    def add_to(self, group: argparse._ActionsContainer, **settings: Any) -> None:
        """Add the option to a parser's group, without a default in the namespace; `settings` are of `add_argument`."""
        text = self.help.replace("%", "%%")
        common = {"dest": self.name, "default": argparse.SUPPRESS, **settings}
        if self.kind == "bool":
            group.add_argument(self.flag, action="store_true", help=text, **common)
            off = f"--no-{hyphens(self.name)}"  # turns off what a file of options turned on
            group.add_argument(off, action="store_false", help=argparse.SUPPRESS, **common)
            return
        default = self.default if self.default_help is None else self.default_help
        if default not in (None, ()):
            text += f" (default: {default})"
        metavar = self.metavar or ("FILE" if self.path else "N")
        if self.choices and not self.metavar:
            metavar = f"{{{','.join(map(str, self.allowed))}}}"
        kind: dict[str, Any] = {"action": "append"} if self.repeated else {"type": self.read}
        group.add_argument(self.flag, help=text, metavar=metavar, **kind, **common)


def hyphens(name: str) -> str:
    return name.replace("_", "-")


def option(default: Any, text: str, **attributes: Any) -> Any:
    """Declare an option as the field of a dataclass; `attributes` are of `Option`, whose kind is the field's type unless named."""
    return field(default=default, metadata={"option": {"default": default, "help": text, **attributes}})


def not_among(option: str, value: Any, allowed: tuple[Any, ...]) -> str:
    """Return the message for a value that is not allowed."""
    known = [str(each) for each in allowed if each is not None]
    near = did_you_mean(str(value), known)
    if near and len(known) > 12:  # such as columns
        return f"{option} {value}: {near}"
    return f"{option} {value}: choose one of {', '.join(known)}" + (f"; {near}" if near else ".")
