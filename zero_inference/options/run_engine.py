"""The options of run_model.py that say what runs the model and where its weights are."""

from __future__ import annotations

import argparse

from zero_inference.config import AUTO, DECODE_GRAPH, ENGINES, GOALS, NORM_KERNELS, QUANT_BITS
from zero_inference.options import values
from zero_inference.options.parser import examples
from zero_inference.options.values import default

BITS = f"{{{','.join(map(str, (*QUANT_BITS, AUTO)))}}}"


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    engine = parser.add_argument_group(
        "engine and offload",
        examples(
            "python run_model.py facebook/opt-66b --engine stream --quant-bits 4",
            "deepspeed --num_gpus 1 run_model.py facebook/opt-66b --cpu-offload",
            "python run_model.py facebook/opt-66b --engine auto --quant-bits auto",
        ),
    )
    engine.add_argument(
        "--engine",
        choices=(*ENGINES, AUTO),
        help="what holds the weights and runs the model. auto: the one that zero-inference plan ranks first on this machine "
        f"{default('engine')}",
    )
    engine.add_argument(
        "--goal",
        choices=GOALS,
        help="what auto looks for in --engine, --batch-size and --quant-bits (default: as many bits as fit, then token/s)",
    )
    engine.add_argument("--cpu-offload", action="store_true", help="keep the weights in host memory")
    engine.add_argument("--disk-offload", action="store_true", help="keep the weights on NVMe, in --offload-dir")
    engine.add_argument(
        "--offload-dir", metavar="DIR", help=f"folder for the weights of --disk-offload {default('offload_dir')}"
    )
    engine.add_argument("--use-gds", action="store_true", help="read NVMe through GPUDirect Storage")
    engine.add_argument(
        "--pin-memory",
        type=int,
        choices=(0, 1),
        help="page-lock the weights in host memory, for faster copies to the GPU (default: 1 with a GPU)",
    )
    engine.add_argument("--kv-offload", action="store_true", help="keep the KV cache in host memory")
    engine.add_argument("--pin-kv-cache", action="store_true", help="page-lock the KV cache in host memory")
    engine.add_argument(
        "--async-kv-offload", action="store_true", help="write new keys and values to it while the layers compute"
    )
    engine.add_argument(
        "--quant-bits",
        type=values.bits_or_auto,
        metavar=BITS,
        help="bits of a stored weight; int8 and int4 work too. auto: as many as fit, or what --goal looks for "
        + default("quant_bits"),
    )
    engine.add_argument(
        "--quant-group-size",
        type=int,
        metavar="N",
        help="quantized weights that share a scale (default: 64 with 8 bits, 32 with 4)",
    )
    engine.add_argument(
        "--norm-kernels",
        choices=NORM_KERNELS,
        help=f"use this package's CUDA kernels for norms. auto: where they are built {default('norm_kernels')}",
    )
    engine.add_argument("--ds-config", metavar="FILE", help="JSON merged over the generated DeepSpeed config")


def add_stream_options(parser: argparse.ArgumentParser) -> None:
    stream = parser.add_argument_group(
        "stream engine",
        "Options of --engine stream, which finds good values for all of them.\n\n"
        + examples("python run_model.py facebook/opt-66b --engine stream --gpu-memory 10GB"),
    )
    stream.add_argument(
        "--gpu-memory",
        type=values.size,
        metavar=values.SIZE,
        help=f"device memory for weights that stay there, 0 for none; {values.SIZES} (default: what is free)",
    )
    stream.add_argument(
        "--ring-depth",
        type=int,
        metavar="N",
        help="layers on their way to the device at once, or parts of layers where the host's cores multiply "
        "(default: as many as keep the link busy; fewer where the CPU multiplies most and GPU memory is short)",
    )
    stream.add_argument(
        "--cpu-compute",
        metavar="auto|off|SHARE",
        help="share (0 to 1) of the weights in host memory that the host's cores multiply where they are, instead of sending them "
        f"over the link. auto: as much as lets cores and link finish together; with several GPUs none {default('cpu_compute')}",
    )
    stream.add_argument(
        "--cpu-threads",
        type=int,
        metavar="N",
        help="host cores that multiply, for all ranks of the host together (default: the physical ones near the GPUs, less "
        "one a rank; without a GPU as many as PyTorch uses)",
    )
    stream.add_argument(
        "--decode-graph",
        choices=DECODE_GRAPH,
        help="launch a decode step as CUDA graphs if they give the same results, with one GPU. auto: unless that is clearly slower "
        f"{default('decode_graph')}",
    )
