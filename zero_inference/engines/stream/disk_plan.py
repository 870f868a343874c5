"""Which weights are on disk, and in which files: what a plan decides before anything is read or written."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from zero_inference.config.options import DEFAULTS
from zero_inference.engines.base import Job
from zero_inference.engines.stream.blocks import Block
from zero_inference.engines.stream.disk import extents_in_file
from zero_inference.engines.stream.placement import GIB, Placement
from zero_inference.kernels.formats import WeightFormat
from zero_inference.models.checkpoint_files import find_shards
from zero_inference.models.layers import decoder_layers
from zero_inference.models.stored_weights import tensors_in_files
from zero_inference.utils.direct_io import Extent, aligned_up, can_read_directly
from zero_inference.utils.format import file_stem

HOST_RESERVE_BYTES = 2 << 30  # host memory that is left to libraries where weights fill it
CONVERTED_SUFFIX = ".blocks"
CONVERTED_VERSION = 1  # of converted files: another one where layouts of blocks mean something else


def host_budget(job: Job, placement: Placement) -> int | None:
    """Return the bytes of host memory for the blocks of a `placement` without blocks on disk; None if all offloaded ones may be there."""
    config, embedding_bytes = job.config, placement.embedding_bytes
    needed = placement.host_bytes + embedding_bytes
    if job.target is not None:
        return None  # of a draft: it is on the device
    if config.host_memory is not None:
        budget = int(config.host_memory * GIB)
    elif config.disk_offload:
        budget = 0
    else:
        of_device = 0 if job.on_gpu else placement.device_bytes + job.cache_device_bytes + job.activation_bytes
        largest_bytes = job.sizes.parameter_bytes // max(1, placement.layers)  # a layer while it is loaded
        budget = job.machine.available_host_bytes() - job.kv_host_bytes - of_device - HOST_RESERVE_BYTES - largest_bytes
        if needed > budget:
            free_bytes = job.machine.disk_free_bytes(config.offload_path)
            in_place = placement.nbytes_of(blocks_in_files(job, placement.blocks).keys() & set(placement.offloaded))
            if free_bytes is None or free_bytes < needed - budget - in_place:
                return None
    return None if needed <= budget or not placement.offloaded else max(0, budget - embedding_bytes)


def blocks_in_files(job: Job, blocks: Sequence[Block]) -> dict[int, list[Extent]]:
    """Return the blocks that a run can read from files that exist: of `zero-inference convert`, or of the checkpoint."""
    path = converted_file(job, blocks)
    sizes = {index: block.layout.nbytes for index, block in enumerate(blocks)}
    if path is not None and _is_complete(path, sum(map(aligned_up, sizes.values()))):
        return extents_in_file(path, sizes)
    return _in_checkpoint(job, blocks)


def converted_file(job: Job, blocks: Sequence[Block]) -> Path | None:
    """Return the file of --offload-dir that `zero-inference convert` writes for this run, which may not exist; None for weights that are
    not here.

    A fingerprint of what its bytes depend on is part of its name: the files of the checkpoint, or the seed, the formats and layouts.
    """
    spec, config = job.spec, job.config
    if spec.dummy:
        source: object = [config.seed, job.ranks.device.type, spec.config.to_dict(), spec.dummy_routing]
    elif spec.weights_are_here:
        folder = spec.checkpoint_folder()
        source = [[path.name, (found := path.stat()).st_size, found.st_mtime_ns] for path in find_shards(folder)[0]]
    else:
        return None
    layouts = [[block.layer, block.module, repr(block.layout.parameters)] for block in blocks]
    form = [spec.dtype_name, config.quant_bits, config.group_size, job.format_name]
    described = json.dumps([CONVERTED_VERSION, source, form, layouts], default=str, sort_keys=True)
    fingerprint = hashlib.sha256(described.encode()).hexdigest()[:16]
    return config.offload_path / f"{file_stem(spec.name)}-{job.format_name}-{fingerprint}{CONVERTED_SUFFIX}"


def _is_complete(path: Path, nbytes: int) -> bool:
    """Return whether a converted file is there, whole, and this user's own: another user's could hold other weights."""
    try:
        found = path.stat()
    except OSError:
        return False
    return found.st_uid == os.geteuid() and found.st_size == nbytes and can_read_directly(path)


def _in_checkpoint(job: Job, blocks: Sequence[Block]) -> dict[int, list[Extent]]:
    """Return the blocks that may be read from the checkpoint's files: all that it stores as the engine does.

    They are on the disk of --offload-dir if that is given, and it allows direct reads.
    """
    formats = job.stored_formats
    if job.quantized and not formats:
        return {}
    model, config = job.empty_model.model, job.config
    prefix, layers = decoder_layers(model)
    names = frozenset(f"{prefix}.{name}" for name, _ in layers.named_parameters())

    def find() -> dict[str, dict[str, list[Extent]]]:
        found = tensors_in_files(model, job.spec, names, formats)
        folder = next((each for each in (config.offload_path, *config.offload_path.parents) if each.exists()), None)
        given = config.offload_dir != DEFAULTS["offload_dir"] and folder is not None
        paths = {name: {each.path for part in parts.values() for each in part} for name, parts in found.items()}
        good = {
            path
            for path in set().union(*paths.values())
            if can_read_directly(path) and not (given and path.stat().st_dev != folder.stat().st_dev)
        }
        return {name: parts for name, parts in found.items() if paths[name] <= good}

    key = "in files", bool(formats), job.spec.weights_are_here, config.offload_dir
    if not job.empty_model.is_empty:
        tensors = job.empty_model.facts.get(key, {})
    else:
        tensors = job.empty_model.cached(key, find)
    found = {index: _extents(block, prefix, tensors, formats) for index, block in enumerate(blocks if tensors else ())}
    return {index: extents for index, extents in found.items() if extents}


def _extents(
    block: Block,
    prefix: str,
    tensors: Mapping[str, Mapping[str, list[Extent]]],
    formats: Mapping[str, tuple[WeightFormat, bool]],
) -> list[Extent]:
    """Return where the bytes of a block's buffer are, of parameter -> tensor -> bytes of it; empty if files do not have all of them."""
    extents = []
    for each in block.layout.parameters:
        name, packed = block.full_name(prefix, each.name), each.packed
        spans = {"values": each.plain} if packed is None else packed.spans
        own_format = not each.transposed if packed is None else name in formats and packed.format == formats[name][0]
        if not own_format or tensors.get(name, {}).keys() != spans.keys():
            return []
        extents += [
            replace(extent, buffer_offset=spans[part].offset + extent.buffer_offset)
            for part, of_part in tensors[name].items()
            for extent in of_part
        ]
    return extents
