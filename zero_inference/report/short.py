"""Short forms of what a record says, for tables and lines in which there is little room."""

from __future__ import annotations

SHORT_DTYPES = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}

# What limits a decode step, by the record's word for it.
BOUND_NAMES = {
    "link": "link",
    "link_and_cores": "link and cores",
    "disk": "disk",
    "device_memory": "device memory",
    "host_memory": "host memory",  # of a run on a CPU, whose record calls it device memory too
    "matmul": "matrix products",
}


def weights_in_short(quant_bits: int | None, dtype: str | None, quantized: bool = False) -> str | None:
    """What a weight is stored as: int4, int8, fp16, ...; None where nothing says so."""
    if quant_bits is not None and quant_bits < 16:
        return f"int{quant_bits}"
    if quant_bits is None and quantized:
        return "quantized"
    return SHORT_DTYPES.get(dtype, dtype) if dtype else "16 bit" if quant_bits == 16 else None


def model_in_short(model: str) -> str:
    """The last part of a hub name or a path."""
    return model.rstrip("/").rpartition("/")[2] or model
