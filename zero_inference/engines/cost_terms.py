"""How an engine uses the machine with what it has placed: what predicted times and limits ask of a plan."""

from __future__ import annotations

from typing import Any

import torch


class CostTerms:
    """What holds of an engine that fetches what it needs and multiplies all on the device; others say where they differ.

    Attributes:
        job, fetched_bytes: see `EnginePlan`.
    """

    job: Any
    fetched_bytes: int

    def beside_link(self) -> tuple[float, float] | None:
        """GB/s of the link and of what the cores read for a step, beside each other; None where these take no part."""
        return None

    @property
    def expects_choices(self) -> bool:
        """Whether what a step moves depends on which experts tokens choose."""
        return False

    @property
    def chosen_bytes(self) -> int:
        """Bytes of `fetched_bytes` that are experts which tokens choose, and no others."""
        return 0

    @property
    def why_whole_layers(self) -> str:
        """Why a step of a mixture copies experts that no token chose, in a few words."""
        return "it fetches whole layers"

    @property
    def lacks_cores(self) -> bool:
        """Whether the host's cores would take part in a run, and this plan does not know how."""
        return False

    @property
    def gpu_memory_bytes(self) -> int | None:
        """What `--gpu-memory` would have to say for the same plan; None of an engine without that option."""
        return None

    @property
    def ring_depth(self) -> int | None:
        """What `--ring-depth` would have to say for the same plan; None where it has nothing to say."""
        return None

    @property
    def prefill_fetched_bytes(self) -> int:
        """Of weights, over all ranks, that a prefill brings to the devices."""
        return self.fetched_bytes

    @property
    def copies_on_cpu(self) -> bool:
        """Whether weights in host memory are copied where there is no GPU, too, and not used where they lie."""
        return False

    @property
    def dequantizes_on_cpu(self) -> bool:
        """Return whether a CPU dequantizes the weights in every pass."""
        return self.job.config.quantized and not self.job.on_gpu

    @property
    def copies_overlap(self) -> bool:
        """Whether weights are copied while the device computes."""
        return True

    @property
    def copies_wait_for_host(self) -> bool:
        """Whether the host asks for further weights only when it has seen the last ones come, so that the link rests while it does."""
        return False

    @property
    def copies_own_memory(self) -> bool:
        """Whether a run measures the link by copies of the weights themselves, and needs no host memory for that."""
        return False

    @property
    def pieces(self) -> int:
        """Of weights, as many as a launched pass sends for one by one: each costs the host time."""
        return 0

    @property
    def restored_blocks(self) -> int:
        """Quantized ones that stay on the device, whose weights a launched pass restores or multiplies as they are."""
        return 0

    @property
    def attending_layers(self) -> int:
        """In which the host's cores attend."""
        return 0

    @property
    def own_work_known(self) -> bool:
        """Whether what the engine does besides the model's work, such as hooks and dequantizing, is little where it was not measured; else
        times are lower bounds then."""
        return True

    @property
    def quantizes_all(self) -> bool:
        """Whether embedding and head are quantized with the layers."""
        return False

    def measure_restored_gb_per_s(self, dtype: torch.dtype) -> float | None:
        """Of weights that become `dtype`, restored from codes by an operator that only this engine has and multiplied with one token, on
        the device and while a model is loaded; None of one that has none."""
        return None

    @property
    def graphs(self) -> bool:
        """Whether decode steps are CUDA graphs."""
        return False

    @property
    def fused_rows(self) -> int:
        """Tokens up to which the device multiplies with quantized weights as they are stored; above them it restores these first."""
        return 0

    @property
    def head_bytes(self) -> tuple[int, int]:
        """Bytes of an output head that is quantized by itself: in the model's dtype, and as it is stored; zeros where it is not."""
        return 0, 0

    def share_on_cores(self) -> tuple[float, float]:
        """Of the bytes of decoder layers without experts, and of those of experts, what the host's cores multiply in a decode step."""
        return 0.0, 0.0

    def cores_s(self) -> float:
        """Seconds in which the device waits for the host's cores in a decode step."""
        return 0.0

    def prefill_share_on_cores(self) -> tuple[float, float]:
        """Return `share_on_cores` of a prefill."""
        return 0.0, 0.0

    def prefill_cores_s(self) -> float:
        """Return `cores_s` of a prefill."""
        return 0.0

    @property
    def prefill_link_gb_per_s(self) -> float | None:
        """GB/s of the link in a prefill, beside the host's cores or by a kernel; None where it is that of copies alone."""
        return None

    def leveled(self, link_s: float, others_s: float) -> tuple[float, float]:
        """Seconds of the link, and of the device and the cores, in a decode step that would take these two: the same, but of an engine that
        lets blocks change hands until both end about together."""
        return link_s, others_s

    def paced_s(self, link_s: float, others_s: float) -> float:
        """Seconds of a decode step that takes the link, and device and cores, as long as this, with what each waits for the other."""
        return max(link_s, others_s)

    def least_cores_s(self) -> float:
        """Seconds that a step's products take the cores if the link rests; 0 where that is not known."""
        return 0.0
