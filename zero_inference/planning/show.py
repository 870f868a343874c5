"""What `--dry-run` prints."""

from __future__ import annotations

import json
from typing import Any

from zero_inference.engines.base import Job
from zero_inference.errors import DoesNotFit
from zero_inference.machine.machine import DescribedMachine
from zero_inference.planning.changes import changes_that_fit, more_memory
from zero_inference.planning.log_sizes import log_sizes
from zero_inference.planning.memory import describe
from zero_inference.planning.outlook import limit_in_words
from zero_inference.planning.plan import Plan
from zero_inference.planning.timing import why_unknown
from zero_inference.runtime.tables import significant


def print_plan(job: Job, plan: Plan | DoesNotFit) -> None:
    """The configuration, the sizes and whether they fit.

    Args:
        plan: of `job`, or why there is none.

    Raises:
        DoesNotFit: after the plan of a run that does not, for its exit code.
    """
    if isinstance(job.machine, DescribedMachine):
        print(f"for another machine: {job.machine.description.in_words()}")
        if caveat := job.machine.description.caveat():
            print(caveat)
        gpus, ranks = job.machine.gpus(), job.ranks.local_world_size
        if gpus > ranks:
            print(
                f"planned for {ranks} of its {gpus} GPUs, a rank each; for all: deepspeed --num_gpus {gpus} run_model.py ..."
            )
    pinned = plan.weights.pinned if isinstance(plan, Plan) else job.pin_weights
    print(json.dumps(_resolved(job, pinned), indent=2))
    for name, size in vars(log_sizes(job)).items():
        print(f"{name.removesuffix('_bytes')} size: {size / 2**30:.3f} GB")  # as the log says it
    print(plan if isinstance(plan, DoesNotFit) else describe(plan.needs))
    if isinstance(plan, Plan):
        for line in plan.weights.in_words():
            print(line)
        if plan.fits:
            if line := limit_in_words(plan.weights):
                print(line)
            description = job.machine.described()
            if plan.times:
                print(plan.times.in_words(job.config.batch_size))
            elif description is not None:
                print(f"no times are predicted: {why_unknown(plan.weights, description)}")
            if plan.load_s is not None:
                print(f"predicted: loading {significant(plan.load_s)} s")
            print("It fits.", flush=True)
            return
    changes = changes_that_fit(job)
    print(
        f"{DoesNotFit.VERDICT} "
        + (
            f"It would with one of: {'; '.join(changes)}."
            if changes
            else f"No change makes it fit, nor do two together: use {more_memory(job)}."
        ),
        flush=True,
    )
    raise DoesNotFit(f"--dry-run: {job.spec.name} does not fit as asked; the plan says where, and what would.")


def _resolved(job: Job, pinned: bool) -> dict[str, Any]:
    return job.config.as_dict() | {
        "dtype": job.spec.dtype_name,
        "model_type": job.spec.config.model_type,
        "world_size": job.ranks.world_size,
        "pin_memory": pinned,
    }
