"""Python instead of the shell: `run`, `plan` and `load`, which `zero_inference` itself exports. None of these modules imports torch."""

from zero_inference.api.loading import load, unload
from zero_inference.api.plans import PlannedRun, Plans, plan
from zero_inference.api.runs import RunResult, run

__all__ = ["PlannedRun", "Plans", "RunResult", "load", "plan", "run", "unload"]
