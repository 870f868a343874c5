"""Exactly sized host memory, page-locked on request.

torch rounds each pinned tensor up to a power of two, which wastes up to half of the host memory for weights. Pages that are mapped and
registered with CUDA here take the tensor's bytes, rounded up to a page.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import resource
import weakref

import torch

from zero_inference.errors import RunError
from zero_inference.utils.format import format_bytes

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
        asked = f"{format_bytes(nbytes)} of host memory was asked for and refused ({error.strerror})"
        hint = "quantize the weights, use --disk-offload or a machine with more memory"
        raise RunError(f"{asked}; {hint}.") from error
    if nbytes >= HUGE_PAGE:
        with contextlib.suppress(OSError):  # a kernel without huge pages
            pages.madvise(mmap.MADV_HUGEPAGE)
    buffer = (ctypes.c_char * nbytes).from_buffer(pages)
    flat = torch.frombuffer(buffer, dtype=dtype, count=numel)
    if pinned:
        flat.view(torch.uint8).zero_()  # pages are faulted in by all of PyTorch's threads; CUDA would do it in one
        _page_lock(flat)
        # the buffer is freed with the tensor; the finalizer keeps the pages mapped until they are unregistered
        weakref.finalize(buffer, _release, flat.data_ptr(), pages).atexit = False
    return flat.view(shape)


def host_copy(values: torch.Tensor, pinned: bool = False) -> torch.Tensor:
    """Return a copy of `values` in new host memory, page-locked if `pinned`, with the strides of `torch.empty_like`."""
    flat = host_empty((values.numel(),), values.dtype, pinned)
    if not pinned:
        flat.view(torch.uint8).zero_()
    strides = torch.empty_like(values, device="meta").stride()
    return flat.as_strided(values.shape, strides).copy_(values)


def _page_lock(tensor: torch.Tensor) -> None:
    """Register the pages of `tensor` with CUDA, until `_release`. Raises RunError if they may not be locked."""
    status = int(torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), tensor.nbytes, PORTABLE))
    if status != 0:
        limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
        shown = "none" if limit == resource.RLIM_INFINITY else format_bytes(limit)
        raise RunError(
            f"{format_bytes(tensor.nbytes)} of host memory could not be page-locked "
            f"(CUDA error {status}, memlock limit {shown}); raise `ulimit -l` or use --pin-memory 0."
        )


def _release(pointer: int, pages: mmap.mmap) -> None:
    torch.cuda.cudart().cudaHostUnregister(pointer)
