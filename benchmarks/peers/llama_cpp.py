"""llama.cpp with random weights of a preset's dimensions (Q4_0; gpt-oss: MXFP4): prefill and decode in tokens a second.

    python benchmarks/peers/llama_cpp.py --model llama-2-13b --source FOLDER --work /dev/shm/llama --output llama_cpp.json
    python benchmarks/peers/llama_cpp.py --model llama-3.1-70b --source FOLDER --work /dev/shm/llama --cuda --prompt-len 512
        --options "-ngl 50 --no-host 0 -lm none -t 8,16" --options "-ngl 50 --no-host 1 -t 8,16"

FOLDER holds the source package of llama-cpp-python (`llama_cpp_python-VERSION.tar.gz` or `.tar.xz`), which has llama.cpp in it;
nothing is fetched. llama-bench and llama-batched-bench are built with cmake for the processor it runs on, once a work folder. A step of
batch 1 is measured by llama-bench after a prompt of the asked length, larger batches by llama-batched-bench, whose sequences share one
prompt. Without `--cuda` both multiply on the CPU alone (`-dev none`). With it they are built for the GPU (or taken from `--programs`), and
llama-bench measures prefill and decode of one sequence with each of `--options`, its own options for what lies where: a row for each
number of threads. Prompts are fastest with `-lm none --no-host 0` (weights in page-locked memory, which its default of mapping the file
is not), decode often with `--no-host 1` (repacked for the CPU, where prompts are then computed too). `-p`, `-n`, `-d` and `-r` among the
options take the place of what is measured by default; with `-d` one process loads the weights once. `--host-memory GIB` leaves it so much
memory, page cache included: for weights that it maps and that do not fit. The file of weights is removed afterwards; with `--keep` it
stays, and is used if it is there.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from benchmarks.peers.gguf_file import tensors_of, weight_type, write_random_gguf  # noqa: E402
from zero_inference.models.built_in import find_preset  # noqa: E402
from zero_inference.utils.environment import available_host_bytes  # noqa: E402

TARGETS = {
    "llama-bench": "llama-bench",
    "llama-batched-bench": "batched-bench",
}  # and their folders in llama.cpp's tools
# llama.cpp's own list of tools needs all their sources; these lines need the two.
CMAKE_LISTS = """cmake_minimum_required(VERSION 3.14)
project(llama_cpp_peer C CXX)
find_package(Threads REQUIRED)
add_subdirectory(${LLAMA_CPP} llama.cpp)
add_subdirectory(${LLAMA_CPP}/tools/llama-bench llama-bench)
add_subdirectory(${LLAMA_CPP}/tools/batched-bench batched-bench)
"""
CMAKE_OPTIONS = {
    "CMAKE_BUILD_TYPE": "Release",
    "GGML_NATIVE": "ON",
    "BUILD_SHARED_LIBS": "OFF",
    "LLAMA_BUILD_COMMON": "ON",
    "LLAMA_BUILD_TOOLS": "OFF",
    "LLAMA_OPENSSL": "OFF",  # no network
    "LLAMA_BUILD_COMMIT": "unknown",  # else that of whatever git repository lies around the folder
}
HOLDERS = 8  # processes that take memory: one takes about 1 GB/s
CUDA_OPTIONS = {"GGML_CUDA": "ON", "GGML_CUDA_FA": "OFF", "CMAKE_CUDA_ARCHITECTURES": "native"}  # FA: most of the time


def main() -> int:
    args = parse_args()
    preset = find_preset(args.model)
    if preset is None:
        print(f"error: --model {args.model}: no such preset.", file=sys.stderr)
        return 2
    args.work.mkdir(parents=True, exist_ok=True)
    programs, version = build(args)
    quantization = weight_type(preset.config).name
    weights = args.work / f"{args.model.replace('/', '-')}-{quantization.lower()}.gguf"
    started = time.perf_counter()
    weight_bytes = sum(tensor.nbytes for tensor in tensors_of(preset.config))
    if not (args.keep and weights.exists()):
        part = weights.with_suffix(".part")
        write_random_gguf(preset.config, part)
        part.rename(weights)
    print(f"{weights}: {weight_bytes / 1e9:.2f} GB in {time.perf_counter() - started:.1f} s", file=sys.stderr)
    try:
        with memory_limit(args.host_memory) as free_bytes:
            rows = measure_options(programs, weights, args) if args.cuda else measure(programs, weights, args)
    finally:
        if not args.keep:
            weights.unlink()
    result = {
        "peer": "llama.cpp",
        "version": version,
        "model": preset.name,
        "weights": quantization,
        "weight_bytes": weight_bytes,
        "threads": args.threads,
        "prompt_len": args.prompt_len,
        "gen_len": args.gen_len,
        "free_host_memory_gib": free_bytes / 2**30,
        "rows": rows,
    }
    text = json.dumps(result, indent=1)
    if args.output:
        args.output.write_text(text + "\n")
    print(text)
    return 0


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", required=True, help="a preset of Llama, Mixtral, Qwen3 or gpt-oss")
    parser.add_argument(
        "--source", type=Path, help="folder with the source package of llama-cpp-python; not needed with --programs"
    )
    parser.add_argument(
        "--work", type=Path, required=True, help="folder for the build and the weights (4.3 to 4.7 bits a weight)"
    )
    parser.add_argument("--threads", type=int, default=max(1, (os.cpu_count() or 2) - 1))
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="compilers at a time")
    parser.add_argument("--batches", type=lambda text: [int(each) for each in text.split(",")], default=[1, 8, 32])
    parser.add_argument("--prompt-len", type=int, default=128)
    parser.add_argument("--gen-len", type=int, default=32)
    parser.add_argument("--repetitions", type=int, default=3, help="of batch 1; larger batches are run once")
    parser.add_argument("--cuda", action="store_true", help="build for the GPU of this machine; measures --options")
    parser.add_argument(
        "--programs", type=Path, metavar="FOLDER", help="take llama-bench from this build folder instead of building"
    )
    parser.add_argument("--options", action="append", help='of llama-bench, such as "-ngl 44 --no-host 1 -t 15"')
    parser.add_argument(
        "--prompt-lens",
        type=lambda text: [int(each) for each in text.split(",")],
        help="prefills to measure with --cuda (default: --prompt-len)",
    )
    parser.add_argument("--host-memory", type=float, metavar="GIB", help="leave so much free memory (default: all)")
    parser.add_argument("--timeout", type=float, default=600, help="seconds that one of the two programs may take")
    parser.add_argument("--keep", action="store_true", help="leave the file of weights; use it if it is there")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    if args.source is None and args.programs is None:
        parser.error("give --source FOLDER, which is built, or --programs FOLDER, a build of your own")
    return args


def build(args: argparse.Namespace) -> tuple[dict[str, Path], str]:
    """Return the programs by name, unpacked and compiled once, and the version of the package, or of `--programs`."""
    if args.programs is not None:
        programs = {target: args.programs / folder / target for target, folder in TARGETS.items()}
        said = subprocess.run([programs["llama-bench"], "--version"], capture_output=True, text=True, check=False)
        found = re.search(r"version: (\S+)", said.stdout + said.stderr)
        return programs, f"llama.cpp {found[1]}" if found else "unknown"
    source, work = args.source, args.work
    packages = sorted(source.glob("llama_cpp_python-*.tar.*"))
    if not packages:
        raise SystemExit(f"error: --source {source}: no llama_cpp_python-*.tar.gz or .tar.xz there; "
                         "`pip download --no-binary llama-cpp-python --no-deps llama-cpp-python` gets one.")  # fmt: skip
    name = packages[-1].name.partition(".tar.")[0]
    llama_cpp, built = work / name / "vendor" / "llama.cpp", work / f"{name}-build"
    if not llama_cpp.is_dir():
        with tarfile.open(packages[-1]) as package:
            package.extractall(work, filter="data")
    (work / "CMakeLists.txt").write_text(CMAKE_LISTS)
    options = [f"-D{key}={value}" for key, value in (CMAKE_OPTIONS | (CUDA_OPTIONS if args.cuda else {})).items()]
    started = time.perf_counter()
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    logged(["cmake", *generator, "-S", work, "-B", built, f"-DLLAMA_CPP={llama_cpp.resolve()}", *options], work)
    logged(["cmake", "--build", built, "--parallel", str(args.jobs), "--target", *TARGETS], work)
    print(f"built {name} in {time.perf_counter() - started:.0f} s", file=sys.stderr)
    return {target: built / folder / target for target, folder in TARGETS.items()}, version_of(name, llama_cpp)


def version_of(name: str, llama_cpp: Path) -> str:
    """The versions of the source package and of llama.cpp in it."""
    numbers = re.findall(
        r"set\(LLAMA_VERSION_(?:MAJOR|MINOR|PATCH) (\d+)\)", (llama_cpp / "CMakeLists.txt").read_text()
    )
    return name.replace("llama_cpp_python-", "llama-cpp-python ") + (
        f", llama.cpp {'.'.join(numbers)}" if numbers else ""
    )


def logged(command: list, work: Path) -> None:
    """Run a step of the build; its output goes to `build.log`, whose end is shown where the step fails."""
    log = work / "build.log"
    with log.open("ab") as file:
        done = subprocess.run([str(part) for part in command], stdout=file, stderr=subprocess.STDOUT, check=False)
    if done.returncode:
        end = log.read_text(errors="replace")[-3000:]
        raise SystemExit(f"{end}\nerror: {command[0]} ended with {done.returncode}; all it said is in {log}.")


@contextmanager
def memory_limit(gib: float | None) -> Iterator[int]:
    """Let other processes hold all free memory but `gib`; files in the page cache leave it. Yield the bytes that are then free."""
    if gib is None:
        yield available_host_bytes()
        return
    nbytes = (available_host_bytes() - int(gib * 2**30)) // HOLDERS
    hold = (
        f"import mmap; held = mmap.mmap(-1, {nbytes}, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE); "
        "print('held', flush=True); input()"
    )
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    holders = [subprocess.Popen([sys.executable, "-c", hold], **pipes) for _ in range(HOLDERS)]
    try:
        if any(each.stdout.readline() != "held\n" for each in holders):
            raise SystemExit(f"error: --host-memory {gib}: the rest of the memory could not be taken.")
        yield available_host_bytes()
    finally:
        for each in holders:
            each.kill()
            each.wait()


def measure_options(programs: dict[str, Path], weights: Path, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row for each of `--options` and number of threads: prefill of each prompt, and decode, of one sequence."""
    rows = []
    for options in args.options or ["-ngl 99"]:
        found: list[dict[str, Any]] = []
        for each in calls_of(options, args):
            command = [str(programs["llama-bench"]), "-m", str(weights), *each, "-o", "jsonl"]
            try:
                said = output_of(command, args.timeout)
            except (subprocess.TimeoutExpired, SystemExit) as error:
                print(f"{options}: {error}", file=sys.stderr)
                said = getattr(error, "stdout", None) or ""  # each line is there as soon as it is measured
            lines = said.decode() if isinstance(said, bytes) else said
            found += [json.loads(line) for line in lines.splitlines() if line.startswith("{") and line.endswith("}")]
        rows += [row_of_options(options, one, found) for one in sorted({each["n_threads"] for each in found})]
        rows += [] if found else [{"batch": 1, "tokens_per_s": None, "options": options, "prefill_tokens_per_s": {}}]
    return rows


def calls_of(options: str, args: argparse.Namespace) -> list[list[str]]:
    """Return llama-bench's options for each process that is started: decode after the first prompt has one of its own."""
    given = shlex.split(options)
    prompts, repeated = args.prompt_lens or [args.prompt_len], ["-r", str(args.repetitions)]
    prefill, decode = ["-p", ",".join(map(str, prompts))], ["-n", str(args.gen_len)]
    if "-d" in given:
        wanted = [[*prefill, *decode, *repeated]]
    else:
        wanted = [[*prefill, "-n", "0", *repeated], ["-p", "0", *decode, "-d", str(prompts[0]), *repeated]]
    calls = []
    for each in wanted:
        pairs = zip(each[::2], each[1::2])
        calls.append([*(word for pair in pairs if pair[0] not in given for word in pair), *given])
    return calls


def row_of_options(options: str, threads: int, found: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what llama-bench's lines say of `threads`, in tokens a second; None or nothing for what has no line."""
    mine = [each for each in found if each["n_threads"] == threads]
    decoded = next((one for one in mine if one["n_gen"]), None)
    made = {"batch": 1, "tokens_per_s": None}
    if decoded:
        made = row(1, decoded["avg_ts"], samples=decoded["samples_ts"], depth=decoded["n_depth"])
    prefilled = {str(one["n_prompt"]): one["avg_ts"] for one in mine if not one["n_gen"]}
    about = {"options": options, "threads": threads, "cpu": mine[0]["cpu_info"], "gpu": mine[0]["gpu_info"]}
    print(
        f"{options}, {threads} threads: prefill {prefilled}, decode {made['tokens_per_s']}", file=sys.stderr, flush=True
    )
    return made | about | {"prefill_tokens_per_s": prefilled, "by": "llama-bench"}


def measure(programs: dict[str, Path], weights: Path, args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row a batch: tokens a second of the decode over all sequences, and seconds of a step."""
    rows = []
    common = ["-m", str(weights), "-dev", "none", "-t", str(args.threads)]  # none: also a build for GPUs
    if 1 in args.batches:
        depth = ["-p", "0", "-n", str(args.gen_len), "-d", str(args.prompt_len), "-r", str(args.repetitions)]
        found = json.loads(output_of([str(programs["llama-bench"]), *common, *depth, "-o", "json"], args.timeout))[-1]
        rows.append(row(1, found["avg_ts"], samples=found["samples_ts"], cpu=found["cpu_info"], by="llama-bench"))
    if larger := [batch for batch in args.batches if batch > 1]:
        context = args.prompt_len + max(larger) * (args.gen_len + 1)  # the prompt is kept once
        shape = [
            "-npp",
            str(args.prompt_len),
            "-ntg",
            str(args.gen_len),
            "-npl",
            ",".join(map(str, larger)),
            "-pps",
            "-kvu",
        ]
        command = [str(programs["llama-batched-bench"]), *common, "-tb", str(args.threads), "-c", str(context), *shape]
        for line in output_of([*command, "--output-format", "jsonl"], args.timeout).splitlines():
            if line.startswith("{"):
                found = json.loads(line)
                rows.append(row(found["pl"], found["speed_tg"], by="llama-batched-bench"))
    return rows


def row(batch: int, tokens_per_s: float, **more: Any) -> dict[str, Any]:
    return {"batch": batch, "tokens_per_s": tokens_per_s, "step_s": batch / tokens_per_s, **more}


def output_of(command: list[str], timeout_s: float) -> str:
    """What a program prints; what it says beside goes to our standard error."""
    started = time.perf_counter()
    done = subprocess.run(command, stdout=subprocess.PIPE, timeout=timeout_s, text=True, check=False)
    print(f"{Path(command[0]).name}: {time.perf_counter() - started:.1f} s", file=sys.stderr)
    if done.returncode:
        raise SystemExit(f"{done.stdout[-2000:]}\nerror: {' '.join(command)} ended with {done.returncode}.")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
