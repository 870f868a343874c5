"""ZeRO-Inference: DeepSpeed ZeRO-3 with weights on the device, in host memory or on NVMe."""
