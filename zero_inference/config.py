"""RunConfig: every choice of one run, with its default, validated in one place.

Importing this module imports neither torch nor transformers, so that `--help` and bad usage answer at once.
"""

from __future__ import annotations

import importlib.util
import os
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from zero_inference.errors import UsageError
from zero_inference.runtime.replace import check_output_file

ENGINES = ("deepspeed", "stream", "accelerate", "resident")
DTYPES = ("auto", "float16", "bfloat16", "float32")
NORM_KERNELS = ("auto", "cuda", "off")
QUANT_BITS = (16, 8, 4)
QUALITY_TASKS = ("mmlu", "hellaswag", "humaneval", "perplexity")
# Options that mean nothing without another one, by that one; `--quality TASK` stands for the task among those of --quality.
QUALITY_COMPANIONS = {
    "--quality": ("quality_data", "quality_limit", "quality_batch_size", "quality_items"),
    "--quality humaneval": (
        "allow_code_execution",
        "humaneval_samples",
        "humaneval_temperature",
        "humaneval_tokens",
        "pass_at_k",
    ),
    "--quality perplexity": ("perplexity_window", "perplexity_stride"),
}
MOST = 2**31 - 1  # of whatever is counted
MOST_GIB = 2**30
# What a whole number may be; what the machine can hold of it is for the plan to say.
WHOLE_NUMBERS = {
    **dict.fromkeys(
        (
            "loops",
            "batch_size",
            "prompt_len",
            "gen_len",
            "quality_limit",
            "quality_batch_size",
            "humaneval_samples",
            "humaneval_tokens",
            "perplexity_window",
            "perplexity_stride",
        ),
        (1, MOST),
    ),
    "warmup": (0, MOST),
    "quant_group_size": (2, MOST),
    "seed": (0, 2**63 - 1),
}
PATHS = (
    "model",
    "prompts",
    "offload_dir",
    "trace",
    "ds_config",
    "quality_data",
    "quality_items",
    "log_file",
    "log_dir",
)
QUALITY_FIELDS = ("quality", *(name for names in QUALITY_COMPANIONS.values() for name in names))


@dataclass(frozen=True)
class RunConfig:
    """What one run was asked to do. Lengths in tokens, sizes in GiB where the name says so.

    `validate()` raises UsageError for anything that can be seen to be wrong without loading the model's config;
    what depends on the model is checked by `zero_inference.run`, before a weight is read.
    """

    model: str = "facebook/opt-1.3b"
    dummy: bool = False
    engine: str = "deepspeed"
    loops: int = 3
    warmup: int = 1
    warmup_spread: float | None = None
    batch_size: int = 1
    prompt_len: int = 512
    gen_len: int = 32
    prompts: str | None = None
    dtype: str = "auto"
    cpu_offload: bool = False
    disk_offload: bool = False
    offload_dir: str = "~/offload_dir"
    use_gds: bool = False
    kv_offload: bool = False
    pin_kv_cache: bool = False
    async_kv_offload: bool = False
    quant_bits: int = 16
    quant_group_size: int = 64
    pin_memory: bool | None = None
    norm_kernels: str = "auto"
    gpu_memory: float | None = None
    ring_depth: int | None = None
    trace: str | None = None
    ds_config: str | None = None
    quality: tuple[str, ...] = ()
    quality_data: str | None = None
    quality_limit: int | None = None
    quality_batch_size: int | None = None
    quality_items: str | None = None
    allow_code_execution: bool = False
    humaneval_samples: int = 1
    humaneval_temperature: float = 0.8
    humaneval_tokens: int = 512
    pass_at_k: tuple[int, ...] = ()
    perplexity_window: int | None = None
    perplexity_stride: int | None = None
    log_file: str | None = None
    log_dir: str = "logs"
    seed: int = 0
    verbose: int = 1
    trust_remote_code: bool = False
    dry_run: bool = False

    @property
    def offload_path(self) -> Path:
        return Path(os.path.expanduser(self.offload_dir)).absolute()

    @property
    def quantized(self) -> bool:
        return self.quant_bits != 16

    @property
    def offload(self) -> str:
        """Where the weights wait: 'cpu', 'disk' or 'gpu' (the device). `validate` turns cpu_offload on for the stream engine."""
        return "cpu" if self.cpu_offload else "disk" if self.disk_offload else "gpu"

    def validate(self) -> RunConfig:
        """Return the configuration with what it implies, or raise UsageError: what was asked, found, and has to change."""
        self._validate_paths()
        self._validate_choices()
        self._validate_engine()
        if self.cpu_offload and self.disk_offload:
            raise UsageError(
                "--cpu-offload and --disk-offload were both given, but weights live in one place: keep one of the two."
            )
        if self.use_gds and not self.disk_offload:
            raise UsageError(
                "--use-gds reads weights from NVMe, but --disk-offload was not given: add it or drop --use-gds."
            )
        self._validate_companions()
        if self.async_kv_offload and not self.pin_kv_cache:
            raise UsageError("--async-kv-offload needs page-locked memory to copy into: add --pin-kv-cache.")
        if self.prompts and self.dummy:
            raise UsageError("--prompts needs a tokenizer and --dummy runs on random token ids: keep one of the two.")
        if self.prompts and not Path(self.prompts).is_file():
            raise UsageError(f"--prompts {self.prompts}: no such file; give a text file with one prompt a line.")
        if self.trace:
            check_output_file("--trace", self.trace)
        self._validate_quality()
        return replace(self, cpu_offload=True) if self.engine == "stream" else self

    def _validate_quality(self) -> None:
        for task in self.quality:
            if task not in QUALITY_TASKS:
                raise UsageError(f"--quality {task}: no such task; choose of {', '.join(QUALITY_TASKS)}.")
        if len(set(self.quality)) < len(self.quality):
            raise UsageError(f"--quality {','.join(self.quality)}: a task is named twice; name each once.")
        default = {field.name: field.default for field in fields(self)}
        for other, names in QUALITY_COMPANIONS.items():
            task = other.removeprefix("--quality").strip()
            for name in names:
                if getattr(self, name) != default[name] and not (task in self.quality if task else self.quality):
                    raise UsageError(
                        f"{_flag(name)} belongs to {other}, which was not given: add that or drop {_flag(name)}."
                    )
        if not self.quality:
            return
        if self.dummy:
            raise UsageError(
                "--quality needs a model with a tokenizer and --dummy has none, and random weights: "
                "keep one of the two."
            )
        if importlib.util.find_spec("lm_eval") is None:
            raise UsageError(
                "--quality works through lm-evaluation-harness, which is not installed: pip install 'lm-eval>=0.4.13'."
            )
        self._validate_quality_numbers()
        self._validate_quality_paths()

    def _validate_quality_numbers(self) -> None:
        if not 0 < self.humaneval_temperature < float("inf"):
            raise UsageError(
                f"--humaneval-temperature {self.humaneval_temperature}: must be a number above 0; "
                "one sample (--humaneval-samples 1) is greedy."
            )
        if self.humaneval_samples == 1 and self.humaneval_temperature != RunConfig.humaneval_temperature:
            raise UsageError(
                "--humaneval-temperature: a single sample is greedy and has none; add --humaneval-samples or drop it."
            )
        for k in self.pass_at_k:
            if not 1 <= k <= self.humaneval_samples:
                raise UsageError(
                    f"--pass-at-k {k}: k has to be 1 to the number of samples, which is {self.humaneval_samples}; "
                    f"lower k or use --humaneval-samples {max(k, 1)}."
                )
        window = self.perplexity_window
        if window is not None and self.perplexity_stride is not None and self.perplexity_stride > window:
            raise UsageError(
                f"--perplexity-stride {self.perplexity_stride}: longer than the window of {window} tokens, "
                "so text would be left out; use at most the window."
            )
        if "humaneval" in self.quality and not self.allow_code_execution:
            raise UsageError(
                "--quality humaneval runs code that the model wrote: allow it with --allow-code-execution "
                "(it is shut in, see the README), or leave humaneval out."
            )

    def _validate_quality_paths(self) -> None:
        needing = [task for task in self.quality if task != "humaneval"]
        if needing and self.quality_data is None:
            raise UsageError(
                f"--quality {','.join(self.quality)}: no data for {', '.join(needing)}; "
                "add --quality-data with a file or folder."
            )
        if self.quality_data is not None:
            if not os.path.exists(self.quality_data):
                raise UsageError(f"--quality-data {self.quality_data}: no such file or folder.")
            if os.path.isfile(self.quality_data) and len(self.quality) > 1:
                raise UsageError(
                    f"--quality-data {self.quality_data} is one file and --quality names {len(self.quality)} tasks; "
                    "give a folder with a file named after each."
                )
        if self.quality_items:
            check_output_file("--quality-items", self.quality_items)

    def _validate_companions(self) -> None:
        """An option that does nothing without another one is an error where that is not given."""
        default = {field.name: field.default for field in fields(self)}
        for name, other, other_given in (
            ("pin_kv_cache", "--kv-offload", self.kv_offload),
            ("async_kv_offload", "--kv-offload", self.kv_offload),
            ("offload_dir", "--disk-offload", self.disk_offload),
            ("quant_group_size", "--quant-bits 8 or 4", self.quantized),
        ):
            if getattr(self, name) != default[name] and not other_given:
                raise UsageError(
                    f"{_flag(name)} belongs to {other}, which was not given: add that or drop {_flag(name)}."
                )
        if self.log_file and self.log_dir != default["log_dir"]:
            raise UsageError(
                f"--log-file {self.log_file} says where the log goes, and so does --log-dir {self.log_dir}: keep one of the two."
            )

    def _validate_paths(self) -> None:
        for name in PATHS:
            path = getattr(self, name)
            if path == "":  # an unset variable of a script: the run would do something else than was meant
                raise UsageError(f"{_flag(name)} is empty: give it a name, or drop it.")
            if name == "offload_dir":
                path = os.path.expanduser(path) if self.disk_offload else None
            if (
                path and path.startswith("~") and name != "model"
            ):  # a folder called ~ is one that people remove with their home
                raise UsageError(
                    f"{_flag(name)} {path}: which home folder ~ stands for is not known here; write it out, "
                    f"or ./{path}."
                )

    def _validate_choices(self) -> None:
        for name, allowed in (
            ("engine", ENGINES),
            ("dtype", DTYPES),
            ("norm_kernels", NORM_KERNELS),
            ("quant_bits", QUANT_BITS),
        ):
            value = getattr(self, name)
            if value not in allowed:
                raise UsageError(f"{_flag(name)} {value}: choose one of {', '.join(map(str, allowed))}.")
        for name, (least, most) in WHOLE_NUMBERS.items():
            value = getattr(self, name)
            if value is not None and not least <= value <= most:
                bound = f"at least {least}" if value < least else f"at most {most}"
                raise UsageError(f"{_flag(name)} {value}: must be {bound}.")
        if self.quant_bits == 4 and self.quant_group_size % 2:
            raise UsageError(
                f"--quant-group-size {self.quant_group_size}: two weights of 4 bits share a byte, so it must be even."
            )
        if self.warmup_spread is not None:
            if not 0 < self.warmup_spread < 1:
                raise UsageError(f"--warmup-spread {self.warmup_spread}: give a share between 0 and 1, such as 0.05.")
            if self.warmup < 3:
                raise UsageError(
                    f"--warmup-spread compares three warm-up loops and --warmup {self.warmup} is the most of them: "
                    "raise --warmup, to 10 or so."
                )
        if self.gpu_memory is not None and not 0 <= self.gpu_memory <= MOST_GIB:
            raise UsageError(f"--gpu-memory {self.gpu_memory}: must be 0 or more GiB, at most {MOST_GIB}.")

    def _validate_engine(self) -> None:
        if self.ring_depth is not None and not 2 <= self.ring_depth <= MOST:
            raise UsageError(
                f"--ring-depth {self.ring_depth}: a layer has to compute while the next one comes: use 2 or more, "
                "and no more than there are layers."
            )
        for name in ("gpu_memory", "ring_depth"):
            if getattr(self, name) is not None and self.engine != "stream":
                raise UsageError(f"{_flag(name)} belongs to --engine stream, not to --engine {self.engine}: drop it.")
        if self.ds_config is not None and self.engine != "deepspeed":
            raise UsageError(f"--ds-config configures DeepSpeed, but --engine is {self.engine}: drop one of the two.")
        if self.engine == "stream" and self.disk_offload:
            raise UsageError(
                "--engine stream keeps weights in host memory, not on disk: drop --disk-offload, "
                "or use --engine deepspeed."
            )
        if self.engine == "resident" and (self.cpu_offload or self.disk_offload):
            raise UsageError(
                "--engine resident keeps every weight on the device: drop the offload, or use --engine deepspeed."
            )
        if self.engine in ("accelerate", "resident"):
            if self.quantized:
                raise UsageError(
                    f"--quant-bits {self.quant_bits} is not done by --engine {self.engine}: "
                    "use --engine deepspeed or stream."
                )
            if self.pin_memory:
                raise UsageError(
                    f"--pin-memory 1 is not done by --engine {self.engine}: use --engine deepspeed or stream."
                )
        if self.use_gds and self.engine != "deepspeed":
            raise UsageError(f"--use-gds is not done by --engine {self.engine}: use --engine deepspeed.")
        if self.pin_memory and self.engine == "deepspeed" and self.offload == "gpu":
            raise UsageError("--pin-memory 1 is about weights in host memory: add --cpu-offload or --disk-offload.")
        if self.engine == "accelerate" and self.offload == "gpu":
            raise UsageError(
                "--engine accelerate is here for its offload: add --cpu-offload or --disk-offload, "
                "or use --engine resident."
            )

    def as_dict(self) -> dict:
        return asdict(self)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


FIELD_NAMES = tuple(field.name for field in fields(RunConfig))
