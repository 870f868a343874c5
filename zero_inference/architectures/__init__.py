"""Models side by side: their speed, their memory and their quality."""

from zero_inference.architectures.quality import QualityBenchmark

__all__ = ["QualityBenchmark"]
