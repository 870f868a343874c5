"""The keys of the record about the hardware: measured rates, the roofline, use of the link, and the environment."""

from __future__ import annotations

from typing import Any

from zero_inference.records.field import Number, Part, inline, key

# Names of the rates that bound a pass.
RATE_WORDS = {
    "device_memory": "device memory",
    "host_memory": "host memory",
    "matmul": "matrix products",
    "link": "the link",
    "peers": "copies between GPUs",
    "link_and_cores": "link and CPU",
    "cores": "the CPU",
    "disk": "the disk",
    "launches": "kernel launches",
}
HOST_COPY = "host memory copy"  # `link_kind` where there is no GPU, and so no link
_STREAM = "--engine stream"
_CPU = "--engine stream with a GPU and --cpu-compute auto or above 0"
_BUSY = ("s", "time the link was copying")
_COPIED = ("byte", "bytes that the first rank copied in that time")
_RATE = ("GB/s", "`copied_bytes` / `busy_s`; null if nothing was copied", "gbps_while_busy")
_REACHED = "the higher of the rate measured for the plan and the rate reached in the loops"


class Rates(Part):
    """Rates measured in this process, in GB/s of 1e9 bytes and TFLOP/s of 1e12.

    The link's rate is the sum over all GPUs, the disk's over all nodes, the others are of the fastest device. None: not applicable, or no
    device memory was left to measure it.
    """

    link_gb_per_s: float = key("GB/s", "host to device, all GPUs at the same time", "link_gbps")
    link_spread: float = key("share", "10th to 90th percentile of the rounds of copies, as a share of `link_gbps`")
    link_kind: str = key("", "what was copied: page-locked memory to a GPU, or, without a GPU, host memory")
    device_copy_gb_per_s: float | None = key("GB/s", "device memory, bytes read and written", "device_copy_gbps")
    matmul_tflops: float | None = key("TFLOP/s", "large matrix product in the model's dtype; on a CPU also of few rows")
    disk_gb_per_s: float | None = key(
        "GB/s",
        "direct reads, all nodes: `disk_alone_gbps` or a loop that read faster; null without weights on disk",
        "disk_gbps",
        default=None,
    )
    link_beside_cores_gb_per_s: float | None = key(
        "GB/s", f"host to device while the CPU multiplies: {_REACHED}", "link_beside_cores_gbps", _CPU, default=None
    )
    cores_gb_per_s: float | None = key(
        "GB/s", f"read by the CPU while the link is busy: {_REACHED}", "cores_gbps", _CPU, default=None
    )
    disk_alone_gb_per_s: float | None = key(
        "GB/s",
        "direct reads with no other work, the mean of those before each loop and after the last",
        "disk_alone_gbps",
        only_with="weights on disk and a known rate",
        default=None,
    )
    link_from: str = key("", "what measured `link_gbps`: `rounds` of copies, or the `loops`", default="rounds")


class StepBounds(Part):
    """The shortest possible decode step by each rate that applies."""

    device_memory: float | None = key("s", "to read weights and KV cache", only_with="a known rate", default=None)
    matmul: float | None = key("s", "to compute the matrix products", only_with="a known rate", default=None)
    link: float | None = key("s", "to copy what crosses the link", only_with="a GPU and an offload", default=None)
    link_and_cores: float | None = key("s", "to copy and to compute, best split", only_with=_CPU, default=None)
    disk: float | None = key("s", "to read from disk", only_with="weights on disk and a known rate", default=None)


class Limit(Part):
    """The roofline of decoding: measured rates, the bound by each, the limiting one and the fraction reached."""

    rates: Rates = inline()
    link_ahead_bytes: int = key("byte", "weights for the decode steps copied before the first of them began")
    floor_step_s: StepBounds = key("s", "the least time that each rate allows for a decode step")
    bound_by: str | None = key("", "the limiting rate, a key of `floor_step_s`; null if there is none")
    floor_decode_s: float | None = key("s", "the shortest decode latency that the rates allow")
    fraction_of_limit: float | None = key("share", "`floor_decode_s` / decode latency")


def _rate_while_busy(given: dict[str, Any]) -> float | None:
    copied_bytes, busy_s = given.get("copied_bytes"), given.get("busy_s")
    return copied_bytes / busy_s / 1e9 if busy_s and copied_bytes is not None else None


class LinkUse(Part):
    """Time of this rank's links in the last decode steps, summed over them: of each, the four times add up to that from its first copy to
    its last."""

    steps: int = key("", "decode steps observed; of a very long generation only the last ones", only_with=_STREAM)
    busy_s: float = key(*_BUSY)
    slot_wait_s: float = key("s", "time the link waited for a slot: the device is the bottleneck", only_with=_STREAM)
    host_late_s: float = key("s", "time the link waited for the host for any other reason", only_with=_STREAM)
    step_start_s: float = key("s", "time the link waited while the host prepared the next step", only_with=_STREAM)
    copied_bytes: int = key(*_COPIED)
    ahead_bytes: int = key("byte", "layers for decode steps copied by the end of the prefill", only_with=_STREAM)
    gb_per_s_while_busy: float | None = key(*_RATE, default_factory=_rate_while_busy)

    @property
    def busy_share(self) -> float:
        """Share of the time from the first to the last copy in which the link copied."""
        total = self.busy_s + self.slot_wait_s + self.step_start_s + self.host_late_s
        return self.busy_s / total if total else 0.0


class TracedLinkUse(Part):
    """Use of this rank's links by an engine without a timeline, from a trace, summed over them."""

    busy_s: float = key(*_BUSY)
    idle_s: float = key("s", "time the link was not copying", only_with="--trace, a GPU, other engines than stream")
    copied_bytes: int = key(*_COPIED)
    gb_per_s_while_busy: float | None = key(*_RATE)


class GpuUse(Part):
    """One of several GPUs that a process drives; null for what its engine does not report."""

    index: int = key("", "number of the GPU, of those visible to the process")
    name: str | None = key("", "name of the GPU")
    peak_bytes: Number | None = key("byte", "its peak memory in the measured loops")
    weight_bytes: Number | None = key("byte", "weights that stay on it")
    host_to_device_bytes_per_step: Number | None = key(
        "byte", "weights that its ring copied in a decode step, without fetched experts"
    )
    link_busy_share: float | None = key("share", "time its link copied, of that from its first copy to its last")
    link_gb_per_s_while_busy: float | None = key("GB/s", "rate of its link while it copied", "link_gbps_while_busy")


class Gpu(Part):
    """A GPU visible to this process."""

    name: str | None = key("", "name of the GPU, from its driver", only_with="a GPU")
    memory_bytes: int | None = key("byte", "total memory of the GPU", only_with="a GPU")


class Environment(Part):
    """Machine, versions and checkout; null for what is unknown."""

    cpu_model: str = key("", "name of the processor")
    cpu_cores: int | None = key("cores", "physical cores of the machine")
    cpu_threads_usable: int | None = key("threads", "hardware threads this process may run on")
    host_memory_bytes: int = key("byte", "total memory of the machine")
    host_memory_limit_bytes: int | None = key("byte", "memory limit of the process's cgroups; null without a limit")
    host_memory_available_bytes: int = key("byte", "memory available when the run began")
    memlock_bytes: int | None = key("byte", "limit of page-locked memory; null without a limit")
    gpus: list[Gpu] = key("", "GPUs visible to this process")
    gpu_driver: str | None = key("", "version of the GPU driver; null without a GPU")
    os: str = key("", "name and version of the operating system")
    kernel: str = key("", "version of the kernel")
    python: str = key("", "version of Python")
    packages: dict[str, str | None] = key("", "versions of the libraries a run uses, by name; null if not installed")
    git_commit: str | None = key("", "commit of the checkout this package runs from; null if it is not in one")
    git_dirty: bool | None = key("", "whether tracked files have uncommitted changes")
