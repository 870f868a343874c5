"""Memory outside the device: host buffers, the offload folder, and the KV cache that lives there."""
