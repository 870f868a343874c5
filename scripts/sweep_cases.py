"""The cases of a sweep: which values there are to choose, and what each combination asks of run_model.py."""

from __future__ import annotations

import argparse
import itertools
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zero_inference.utils.format import file_stem

# Options that change where a run writes, not what it measures.
UNMEASURED = {"log-dir", "log-file", "verbose", "local-rank"}


@dataclass(frozen=True)
class Axis:
    """A choice that is swept: the option here and, but for `offload` and `num-gpus`, of run_model.py."""

    option: str
    type: type
    default: Any
    choices: tuple | None = None
    help: str | None = None


# The last one varies fastest. The defaults are those of run_model.py.
AXES = (
    Axis("model", str, "facebook/opt-1.3b"),
    Axis("engine", str, "deepspeed"),
    Axis("dtype", str, "auto"),
    Axis("num-gpus", int, None, help="default: the launcher's; DeepSpeed overrides CUDA_VISIBLE_DEVICES where given"),
    Axis("prompt-len", int, 512),
    Axis("gen-len", int, 32),
    Axis("offload", str, "gpu", ("cpu", "disk", "gpu"), "where the weights are (default: gpu, no offload)"),
    Axis("quant-bits", int, 16, (16, 8, 4)),
    Axis("quant-group-size", int, 64),
    Axis("kv-offload", int, 0, (0, 1)),
    Axis("batch-size", int, 1),
)


@dataclass(frozen=True)
class Case:
    """One combination of the axes' values, run with the same `extra` arguments as all the others."""

    values: tuple[tuple[str, Any], ...]
    dummy: bool
    launcher: str
    extra: tuple[str, ...]

    def arguments(self) -> list[str]:
        """For run_model.py; one long option a choice, none for a flag that is off."""
        arguments = []
        for option, value in self.values:
            if option == "offload":
                arguments += [] if value == "gpu" else [f"--{value}-offload"]
            elif option == "kv-offload":
                arguments += ["--kv-offload"] if value else []
            elif option != "num-gpus" and value is not None:
                arguments += [f"--{option}", str(value)]
        return arguments + (["--dummy"] if self.dummy else []) + list(self.extra)

    def command(self, program: Path, log_dir: Path) -> list[str]:
        gpus = dict(self.values)["num-gpus"]
        if self.launcher == "deepspeed":
            launch = ["deepspeed", *(["--num_gpus", str(gpus)] if gpus else [])]
        elif self.launcher == "torchrun":
            launch = ["torchrun", "--standalone", f"--nproc-per-node={gpus or 1}"]
        else:
            launch = ["python"]
        return [*launch, os.path.relpath(program), *self.arguments(), "--log-dir", str(log_dir)]

    def expected(self) -> dict[str, Any]:
        """The record keys that are known before the run, with their values."""
        values = dict(self.values)
        known = {option.replace("-", "_"): value for option, value in values.items() if option != "offload"}
        known["cpu_offload"], known["disk_offload"] = values["offload"] == "cpu", values["offload"] == "disk"
        known["kv_offload"] = bool(values["kv-offload"])
        known["dummy"] = self.dummy
        world_size = known.pop("num_gpus") or (None if self.launcher == "deepspeed" else 1)
        known["world_size"] = world_size
        # The record holds what `auto` came to and, for deepspeed alone, all the GPUs there are.
        return {key: value for key, value in known.items() if value not in (None, "auto")}

    def is_request_of(self, record: dict[str, Any]) -> bool:
        """Whether `record` is of this request: equal in the keys it holds, and given the same other options."""
        expected = self.expected()
        if any(record.get(key) != value for key, value in expected.items()):
            return False
        compared = UNMEASURED | {key.replace("_", "-") for key in expected} | {"quant-group-size"}
        argv = record.get("argv")
        asked, given = options_of(self.arguments()), options_of(argv if isinstance(argv, list) else [])
        return all(asked.get(key) == given.get(key) for key in (asked.keys() | given.keys()) - compared)

    def label(self) -> str:
        values = dict(self.values)
        parts = [values["model"].rstrip("/").rpartition("/")[2], values["engine"], values["offload"]]
        parts += [f"w{values['quant-bits']}", *(["kv-offload"] if values["kv-offload"] else [])]
        parts += [values["dtype"]] if values["dtype"] != "auto" else []
        parts += [f"group{values['quant-group-size']}"] if values["quant-group-size"] not in (None, 64) else []
        parts += [f"gpus{values['num-gpus']}"] if values["num-gpus"] else []
        parts += [f"prompt{values['prompt-len']}", f"gen{values['gen-len']}", f"bs{values['batch-size']}"]
        return file_stem("-".join(parts))


def options_of(argv: list[str]) -> dict[str, tuple[str, ...]]:
    """`--some_option a b` and `--some-option=a` as {"some-option": ("a", "b")}; `auto` is as good as not given."""
    options: dict[str, tuple[str, ...]] = {}
    name = None
    for word in map(str, argv):
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            name = name.replace("_", "-")
            options[name] = (value,) if equals else ()
        elif name is not None:
            options[name] += (word,)
    return {name: values for name, values in options.items() if values != ("auto",)}


def expand(args: argparse.Namespace, extra: list[str]) -> list[Case]:
    """Every combination once, in the order given."""
    cases: dict[Case, None] = {}
    for values in itertools.product(*(getattr(args, axis.option.replace("-", "_")) for axis in AXES)):
        choice = dict(zip((axis.option for axis in AXES), values))
        if choice["quant-bits"] == 16:
            choice["quant-group-size"] = None  # has no meaning there, so it makes no second case
        if choice["engine"] == "stream" and choice["offload"] == "gpu":
            choice["offload"] = "cpu"  # where that engine always keeps what does not fit the device, and records it
        cases[Case(tuple(choice.items()), args.dummy, args.launcher, tuple(extra))] = None
    return list(cases)
