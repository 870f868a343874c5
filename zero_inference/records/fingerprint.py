"""A fingerprint of generated ids, to compare runs by."""

from __future__ import annotations

import hashlib
from typing import Any


def output_ids_sha256(ids: Any) -> str:
    """SHA-256, in hex, of generated ids [B, G] as int64 little-endian, row by row.

    `ids` is a torch tensor of any device, a numpy array or nested lists. Raises ValueError if it has not
    two dimensions or is not of integers.
    """
    import numpy as np

    if hasattr(ids, "detach"):
        ids = ids.detach().cpu().numpy()
    array = np.asarray(ids)
    if array.ndim != 2 or (array.dtype.kind not in "iu" and array.size):
        raise ValueError(f"ids must be integers [B, G], got {array.dtype} of shape {list(array.shape)}")
    return hashlib.sha256(np.ascontiguousarray(array, dtype="<i8").tobytes()).hexdigest()
