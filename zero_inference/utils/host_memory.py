"""Exactly sized host memory, page-locked on request.

torch rounds each pinned tensor up to a power of two, which wastes up to half of the host memory for weights. Pages that are mapped and
registered with CUDA here take the tensor's bytes, rounded up to a page.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import os
import resource
import weakref
from collections.abc import Sequence
from pathlib import Path

import torch

from zero_inference.errors import RunError
from zero_inference.utils.format import format_bytes
from zero_inference.utils.ranks import Ranks

HUGE_PAGE = 2 << 20
PORTABLE = 1  # cudaHostRegisterPortable: page-locked for every device, not for the current one alone


def host_empty(shape: tuple[int, ...] | torch.Size, dtype: torch.dtype, pinned: bool) -> torch.Tensor:
    """Return an uninitialized host tensor; page-locked, for asynchronous copies, if `pinned`.

    Raises:
        RunError: there is not enough memory, or it may not be locked.
    """
    numel = math.prod(shape)
    nbytes = numel * dtype.itemsize
    if nbytes == 0:
        return torch.empty(shape, dtype=dtype)
    try:
        pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared pages would not be huge
    except OSError as error:
        raise RunError(refusal_message(nbytes, error)) from error
    if nbytes >= HUGE_PAGE:
        with contextlib.suppress(OSError):  # a kernel without huge pages
            pages.madvise(mmap.MADV_HUGEPAGE)
    buffer = (ctypes.c_char * nbytes).from_buffer(pages)
    flat = torch.frombuffer(buffer, dtype=dtype, count=numel)
    if pinned:
        flat.view(torch.uint8).zero_()  # pages are faulted in by all of PyTorch's threads; CUDA would do it in one
        page_lock(flat)
        # the buffer is freed with the tensor; the finalizer keeps the pages mapped until they are unregistered
        weakref.finalize(buffer, _release, flat.data_ptr(), pages).atexit = False
    return flat.view(shape)


def host_copy(values: torch.Tensor) -> torch.Tensor:
    """Return a copy of `values` in new host memory that is not page-locked, with the strides of `torch.empty_like`."""
    flat = host_empty((values.numel(),), values.dtype, pinned=False)
    flat.view(torch.uint8).zero_()
    strides = torch.empty_like(values, device="meta").stride()
    return flat.as_strided(values.shape, strides).copy_(values)


def refusal_message(nbytes: int, error: OSError) -> str:
    """Return the error message for memory that the system refused."""
    asked = f"{format_bytes(nbytes)} of host memory was asked for and refused ({error.strerror})"
    return f"{asked}; quantize the weights, use --disk-offload or a machine with more memory."


def page_lock(tensor: torch.Tensor) -> None:
    """Register the pages of `tensor` with CUDA, until `page_unlock`. Raises RunError if they may not be locked."""
    status = int(torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), tensor.nbytes, PORTABLE))
    if status != 0:
        limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
        shown = "none" if limit == resource.RLIM_INFINITY else format_bytes(limit)
        raise RunError(
            f"{format_bytes(tensor.nbytes)} of host memory could not be page-locked "
            f"(CUDA error {status}, memlock limit {shown}); raise `ulimit -l` or use --pin-memory 0."
        )


def page_unlock(pointer: int) -> None:
    """Undo `page_lock` of the memory that begins at `pointer`."""
    torch.cuda.cudart().cudaHostUnregister(pointer)


def _release(pointer: int, pages: mmap.mmap) -> None:
    page_unlock(pointer)


MADV_COLLAPSE = 25  # Linux 6.1
MAP_FIXED = 0x10
MAP_FAILED = ctypes.c_void_p(-1).value
BOOT = Path("/proc/sys/kernel/random/boot_id")

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


_Identity = tuple[str, int, int]  # boot of the system, device, inode


class SharedMemory:
    """Memory of the ranks of a host, which make it together and alike: a single copy, which each of them page-locks for its own device.

    It is a file without a name (memfd_create), which lives as long as a process maps it: nothing of it is left, however the ranks end, and
    no size of /dev/shm limits it.

    Attributes:
        bytes: uint8 [nbytes], zeros at first; the same memory in all ranks.

    Raises:
        RunError: in all ranks, where one of them does not get it.
    """

    def __init__(self, nbytes: int, ranks: Ranks):
        self.nbytes, self.ranks = nbytes, ranks
        self.locked: list[int] = []  # where page-locked memory begins
        self.bytes: torch.Tensor
        descriptor, path, identity, problem = -1, "", ("", 0, 0), None
        if ranks.is_first:
            try:
                descriptor = os.memfd_create("zero-inference")
                os.ftruncate(descriptor, nbytes)
                path, identity = f"/proc/{os.getpid()}/fd/{descriptor}", _identity(descriptor)
            except OSError as error:
                problem = refusal_message(nbytes, error)
        try:
            path, identity, problem = ranks.gather_objects((path, identity, problem))[0]
            try:
                if problem is None:
                    descriptor = descriptor if ranks.is_first else _open(path, identity)
                    self.bytes = _map(descriptor, nbytes, self.locked)
            except RunError as error:
                problem = str(error)
            _refuse(ranks.gather_objects(problem))
        finally:
            if descriptor >= 0:
                os.close(descriptor)

    def settle(self, pinned: bool) -> None:
        """Make the pages huge where the system can, and page-lock them if `pinned`. All ranks call it, each after filling its part.

        Raises:
            RunError: in all ranks, where one of them may not page-lock it.
        """
        self.ranks.barrier()
        units = self.nbytes // HUGE_PAGE
        first, end = (units * part // self.ranks.world_size for part in (self.ranks.rank, self.ranks.rank + 1))
        if first < end:  # only faster, so a system that cannot is not asked why
            _libc.madvise(self.bytes.data_ptr() + first * HUGE_PAGE, (end - first) * HUGE_PAGE, MADV_COLLAPSE)
        self.ranks.barrier()  # a page that is locked cannot be made huge
        if pinned:
            problem = None
            try:
                page_lock(self.bytes)
                self.locked.append(self.bytes.data_ptr())
            except RunError as error:
                problem = str(error)
            _refuse(self.ranks.gather_objects(problem))


def _refuse(problems: Sequence[str | None]) -> None:
    """Raise RunError with the first of the ranks' problems, if one has any."""
    for problem in problems:
        if problem is not None:
            raise RunError(problem)


def _identity(file: int | str) -> _Identity:
    found = os.stat(file)
    return BOOT.read_text().strip() if BOOT.exists() else "", found.st_dev, found.st_ino


def _open(path: str, identity: _Identity) -> int:
    """Return a descriptor of the first rank's file."""
    reason = "it is not there"
    with contextlib.suppress(OSError):
        if _identity(path) == identity:
            return os.open(path, os.O_RDWR | os.O_CLOEXEC)
        reason = "another host or container"
    raise RunError(
        f"memory that the first rank shares cannot be opened ({reason}): start all ranks on one host as one user and in one "
        "container, or use --cpu-compute off."
    )


def _map(descriptor: int, nbytes: int, locked: list[int]) -> torch.Tensor:
    """Return the file mapped as uint8 [nbytes], aligned to a huge page."""
    free = _libc.mmap(None, nbytes + HUGE_PAGE, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    if free == MAP_FAILED:
        raise RunError(refusal_message(nbytes, _last_error()))
    start = -(-free // HUGE_PAGE) * HUGE_PAGE
    access = mmap.PROT_READ | mmap.PROT_WRITE
    if _libc.mmap(start, nbytes, access, mmap.MAP_SHARED | MAP_FIXED, descriptor, 0) == MAP_FAILED:
        error = _last_error()
        _libc.munmap(free, nbytes + HUGE_PAGE)
        raise RunError(refusal_message(nbytes, error))
    _libc.madvise(start, nbytes, mmap.MADV_HUGEPAGE)  # for pages that are written first
    buffer = (ctypes.c_char * nbytes).from_address(start)
    weakref.finalize(buffer, _unmap, free, nbytes + HUGE_PAGE, locked).atexit = False  # with the last tensor
    return torch.frombuffer(buffer, dtype=torch.uint8, count=nbytes)


def _unmap(start: int, nbytes: int, locked: list[int]) -> None:
    for pointer in locked:
        page_unlock(pointer)
    _libc.munmap(start, nbytes)


def _last_error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))
