"""Cache folders, locks, the two ways to write a file (append under a lock, or replace atomically), and the four-line log of a run."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import platform
import re
import secrets
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from zero_inference.errors import UsageError

EXTENSIONS = "zero-inference/extensions"
LOCK_S = 900.0  # DeepSpeed's modules take minutes to compile
APPEND_LOCK_S = 10.0  # a lock is held for one write, so a longer holder is stopped or stuck
POLL_S = 0.01
RESULT_PREFIXES = (b'{"schema_version"', b"model size: ")  # how records and logs begin


# Cache folders, one rule for all:
#   unpacked models          ${ZERO_INFERENCE_CACHE}, by default ${XDG_CACHE_HOME:-~/.cache}/zero-inference
#   hardware profile         the file ${ZERO_INFERENCE_MACHINE}, by default one named after the host in the folder above
#   DeepSpeed's modules      ${TORCH_EXTENSIONS_DIR}, by default a subfolder of ${XDG_CACHE_HOME:-~/.cache}/EXTENSIONS
#   this package's libraries the same, but never in a subfolder that is DeepSpeed's


def user_cache() -> Path:
    """Return the user's cache folder, absolute. An empty XDG_CACHE_HOME counts as unset (XDG Base Directory Specification)."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser().absolute()


def models_folder() -> Path:
    """Return the folder for unpacked checkpoints."""
    given = os.environ.get("ZERO_INFERENCE_CACHE")
    return Path(given).expanduser().absolute() if given else user_cache() / "zero-inference"


def extensions_folder() -> Path:
    """Return the folder for compiled code: TORCH_EXTENSIONS_DIR, unless DeepSpeed's engine set it (to a folder below EXTENSIONS)."""
    given = os.environ.get("TORCH_EXTENSIONS_DIR")
    return Path(given) if given and EXTENSIONS not in given else user_cache() / EXTENSIONS


def machine_path() -> Path:
    """Return the file of this host's hardware profile. Hosts that share a home folder have one each."""
    if given := os.environ.get("ZERO_INFERENCE_MACHINE"):
        return Path(given).expanduser().absolute()
    return models_folder() / f"machine-{re.sub(r'[^A-Za-z0-9.-]', '_', platform.node()) or 'this'}.json"


def make_folder(folder: Path) -> Path:
    """Make the cache folder `folder` if need be, and return it. Raises UsageError if it cannot be made."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"the cache folder {folder} cannot be made ({error.strerror}: {error.filename}); remove what is in its way, or name another "
            "folder with XDG_CACHE_HOME, ZERO_INFERENCE_CACHE or TORCH_EXTENSIONS_DIR."
        ) from error
    return folder


@contextlib.contextmanager
def hold_lock(path: Path, timeout_s: float = LOCK_S) -> Iterator[None]:
    """Hold an exclusive lock between processes on the file `path`, which is made if need be.

    Raises:
        TimeoutError: another process, perhaps a stopped one, held the lock for `timeout_s` seconds.
        OSError: the file cannot be opened.
    """
    from filelock import FileLock, Timeout  # 24 ms, which `--help` need not take

    lock = FileLock(path)
    try:
        lock.acquire(timeout=timeout_s, poll_interval=POLL_S)
    except Timeout:
        raise _lock_timeout(path, timeout_s) from None
    try:
        yield
    finally:
        lock.release()


def _lock_timeout(path: str | os.PathLike, timeout_s: float) -> TimeoutError:
    return TimeoutError(errno.ETIMEDOUT, f"another process has kept it locked for {timeout_s:.0f} s", str(path))


def append_bytes(path: str | os.PathLike, data: bytes, *, sync: bool = False, on_new_line: bool = False) -> None:
    """Append `data` to `path` with one write under an exclusive lock: all of it, or nothing and OSError.

    Args:
        sync: return only once it is on disk.
        on_new_line: first end a last line that a crash left open (in the same write), so that only that line is damaged.

    Raises:
        TimeoutError: another process held the lock for `APPEND_LOCK_S`.
        OSError: it cannot be written.
    """
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with _open_to_append(path) as fd:
        regular = stat.S_ISREG(os.fstat(fd).st_mode)
        size = os.fstat(fd).st_size if regular else 0
        if on_new_line and size and os.pread(fd, 1, size - 1) != b"\n":
            data = b"\n" + data
        try:
            written = os.write(fd, data)
            if written != len(data):
                raise OSError(errno.ENOSPC, f"only {written} of {len(data)} bytes fitted", str(path))
        except OSError:  # a full disk takes a part of the data, or only the new file's name
            if regular:
                os.ftruncate(fd, size)
            raise
        if sync and regular:
            os.fsync(fd)


def check_appendable(path: str | os.PathLike) -> None:
    """Raise OSError if nothing can be appended to `path` now. Makes missing folders, but leaves no empty file."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with _open_to_append(path):
        pass


@contextlib.contextmanager
def _open_to_append(path: str | os.PathLike) -> Iterator[int]:
    """Yield a descriptor of `path`, locked for appending; a file that was made here and is still empty at the end is removed.

    The lock is on the log itself and not filelock's, so no file appears beside it. A process that waited for the lock of a file that
    was removed meanwhile opens it again.
    """
    target = os.path.realpath(path)
    while True:
        fd, created = _open_or_create(target)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode) and not stat.S_ISCHR(os.fstat(fd).st_mode):
                raise OSError(errno.EINVAL, "neither a file nor a device", str(path))
            locked = _lock(fd, target)
            if _is_at(target, fd):
                try:
                    yield fd
                finally:
                    if created and locked and os.fstat(fd).st_size == 0:
                        os.unlink(target)
                return
        finally:
            os.close(fd)


def _open_or_create(path: str) -> tuple[int, bool]:
    """Return a descriptor, and whether the file was created; others may create and remove it at the same time."""
    flags = os.O_RDWR | os.O_APPEND | os.O_CLOEXEC
    while True:
        with contextlib.suppress(FileExistsError):
            return os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o666), True
        with contextlib.suppress(FileNotFoundError):
            return os.open(path, flags), False


def _is_at(path: str, fd: int) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:  # its writer may remove it at any time
        return False


def _lock(fd: int, path: str) -> bool:
    """Take an flock; False where the file system has none: O_APPEND alone separates writes there. Raises TimeoutError."""
    deadline = time.monotonic() + APPEND_LOCK_S
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise _lock_timeout(path, APPEND_LOCK_S) from None
            time.sleep(POLL_S)
        except OSError as error:
            if error.errno not in (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK):
                raise
            return False


@contextlib.contextmanager
def write_atomically(path: str | os.PathLike) -> Iterator[Path]:
    """Yield a new, empty file that replaces `path` at the end of the block; after an error, what was there stays.

    Symbolic links stay, and so does the mode of a file that was there. Raises OSError if it cannot be made or renamed.
    """
    part, target = _make_part(path)
    try:
        with contextlib.suppress(FileNotFoundError):
            part.chmod(stat.S_IMODE(target.stat().st_mode))
        yield part
        with open(part, "rb") as written:
            os.fsync(written.fileno())  # or a power cut could leave the name of an empty file
        os.replace(part, target)
    finally:
        part.unlink(missing_ok=True)


def check_output_file(option: str, path: str | os.PathLike) -> None:
    """Raise UsageError that names `option` if `write_atomically` cannot write `path`, or must not: no file, or results of runs.

    Makes no folders and leaves no files. Several processes may check one path at the same time.
    """
    try:
        if os.path.lexists(path) and not os.path.isfile(path):  # also a dangling link: its target is not what was named
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        with contextlib.suppress(FileNotFoundError), open(path, "r+b") as there:
            if there.read(max(map(len, RESULT_PREFIXES))).startswith(RESULT_PREFIXES):
                raise OSError(errno.EEXIST, "it holds what runs have measured", str(path))
        _make_part(path)[0].unlink()
    except OSError as error:
        raise UsageError(
            f"{option} {path} cannot be written ({error.strerror}); name another file, in a folder that can be written."
        ) from error


def _make_part(path: str | os.PathLike) -> tuple[Path, Path]:
    """Make an empty file beside the target of `path`; return it and the target."""
    target = Path(os.path.realpath(path))
    if len(os.fsencode(target.name)) > os.pathconf(target.parent, "PC_NAME_MAX"):
        raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG), str(path))
    part = target.parent / f".{secrets.token_hex(8)}.part"
    os.close(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
    return part, target


KB = 1 << 10
MB = 1 << 20
GB = 1 << 30
T = 1e12

# The log block: one tuple a line, (label, unit, key of the record). Written here, read by `records.read.parse_log`.
LOG_LINES = (
    (("model size", "GB", "model_bytes"),
     ("cache size", "GB", "cache_bytes"),
     ("hidden size (p)", "GB", "hidden_bytes")),
    (("peak gpu mem", "GB", "peak_gpu_bytes"),
     ("prefill latency", "s", "prefill_latency_s"),
     ("prefill throughput", "token/s", "prefill_throughput")),
    (("decode latency", "s", "decode_latency_s"),
     ("decode throughput", "token/s", "decode_throughput")),
    (("total latency", "s", "total_latency_s"),
     ("total throughput", "token/s", "total_throughput")),
)  # fmt: skip


def get_filename(
    model_name: str,
    batch_size: int,
    prompt_len: int,
    gen_len: int,
    cpu_offload: bool,
    disk_offload: bool,
    num_nodes: int,
    num_gpus_per_node: int,
    kv_offload: bool,
    weight_quantize: bool,
    *,
    prefix: str = "ds",
) -> str:
    """Return the name of a run's log, without folder and extension; `prefix` is the engine's (`ds` is DeepSpeed).

    `model_name` is a hub name or a folder; its last part is used, for `.` and `..` that of the real folder.
    """
    name = Path(model_name).name
    if name in ("", ".", ".."):
        name = Path(model_name).resolve().name or "root"
    place = "cpu" if cpu_offload else "disk" if disk_offload else "gpu"
    filename = f"{prefix}-{name}-bs{batch_size}-prompt{prompt_len}-gen{gen_len}"
    filename += f"-n{num_nodes}x{num_gpus_per_node}-{place}"
    return filename + ("-kv_offload" if kv_offload else "") + ("-w_quant" if weight_quantize else "")


def write_benchmark_log(
    filename: str | os.PathLike,
    model_size: float | None,
    cache_size: float | None,
    hidden_size: float | None,
    gpu_peak_mem: float | None,
    prefill_latency: float | None,
    prefill_throughput: float | None,
    decode_latency: float | None,
    decode_throughput: float | None,
    total_latency: float | None,
    total_throughput: float | None,
) -> str:
    """Append the four-line block and a newline to `filename` in one write, and return the block.

    Sizes are bytes, latencies seconds, throughputs tokens per second; None prints as `nan`. Missing
    parent folders are made. Processes may append to one file at once.
    """
    sizes = [model_size, cache_size, hidden_size, gpu_peak_mem]
    rates = [prefill_latency, prefill_throughput, decode_latency, decode_throughput, total_latency, total_throughput]
    values = iter([None if size is None else size / GB for size in sizes] + rates)

    def field(label: str, unit: str) -> str:
        value = next(values)
        return f"{label}: {float('nan') if value is None else value:.3f} {unit}"

    block = "\n".join("\t".join(field(label, unit) for label, unit, _ in line) for line in LOG_LINES)
    append_bytes(filename, (block + "\n").encode())
    return block
