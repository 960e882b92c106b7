"""Where the backward of a captured graph is cut for DistributedDataParallel, and why, as an explanation tells it."""

from __future__ import annotations

from collections.abc import Sequence

from torchdistributed.buckets import MIB
from torchdistributed.replicas import ReducerPlan, active_replica, is_parameter, reducer_plan, stage_parameters
from torchdynamo.explain import Explanation, Section

_TITLE = "Backward in stages: the reducer sends a bucket while the next stage runs"
_HEAD = ["graph", "stage", "bucket", "parameters", "bytes", "why it ends there"]


def explain_stages(found: Explanation, number: int, inputs: Sequence[object]) -> None:
    """Adds the stages of the backward of a graph that a replica runs."""
    replicated = active_replica()
    if replicated is None or not any(map(is_parameter, inputs)):
        return
    plan = reducer_plan(replicated, inputs)
    held = stage_parameters(plan, inputs)
    rows = [
        [
            str(number),
            str(stage),
            str(bucket),
            ", ".join(parameter.name for parameter in parameters),
            str(sum(parameter.nbytes for parameter in parameters)),
            _why(plan, bucket, cap=replicated.bucket_bytes_cap),
        ]
        for stage, (bucket, parameters) in enumerate(held)
    ]
    for title, _, known in found.more:
        if title == _TITLE:
            known.extend(rows)
            return
    section: Section = (_TITLE, _HEAD, rows)
    found.more.append(section)


def _why(plan: ReducerPlan, bucket: int, cap: int) -> str:
    """What makes a stage end with the parameters of its bucket."""
    if len(plan.buckets) == 1:
        return f"all parameters are in one bucket of less than {cap / MIB:g} MiB: there is nothing to cut"
    if bucket == plan.buckets[-1].index:
        return "the last bucket: no parameters are left"
    size = plan.buckets[bucket].nbytes / MIB
    made = "made" if plan.final else "will make"
    return f"bucket {bucket} is complete with {size:.3g} MiB, as the reducer {made} it, and is sent from here on"
