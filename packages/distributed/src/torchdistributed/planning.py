"""Chooses the size of DistributedDataParallel's buckets by simulating a step: `plan(model, ranks=..., tokens=...)`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from torchdistributed.buckets import MIB, Bucket, parameter_infos, plan_buckets, tables_before_weights
from torchdistributed.errors import BucketPlanError
from torchdistributed.simulate import Link, Part, Timeline, replicas

CAPS = (1.0, 2.0, 5.0, 10.0, 25.0, 50.0, 100.0, 200.0, 400.0)


@dataclass(frozen=True, slots=True)
class Plan:
    """Attributes:
    cap_mib: for `DistributedDataParallel(bucket_cap_mb=...)`.
    timeline: of the step with these buckets.
    seconds: of a step, by the caps that were tried.
    """

    cap_mib: float
    buckets: tuple[Bucket, ...]
    ranks: int
    timeline: Timeline
    seconds: Mapping[float, float]

    def __str__(self) -> str:
        tried = ", ".join(f"{cap:g} MiB {seconds * 1e3:.2f} ms" for cap, seconds in self.seconds.items())
        lines = [
            f"bucket_cap_mb={self.cap_mib:g}: {len(self.buckets)} buckets for {self.ranks} ranks",
            f"a step by the cap: {tried}",
            str(self.timeline),
        ]
        for bucket in self.buckets:
            names = f"{bucket.names[0]} ... {bucket.names[-1]}" if len(bucket.names) > 1 else bucket.names[0]
            lines.append(f"bucket {bucket.index:3d} {bucket.nbytes / MIB:9.2f} MiB  {names}")
        return "\n".join(lines)


def plan(
    model: nn.Module,
    *,
    ranks: int,
    tokens: int,
    flops: float = 400e12,
    link: Link | None = None,
    backward: Mapping[str, float] | None = None,
    caps: Sequence[float] = CAPS,
) -> Plan:
    """The buckets for which a simulated step is shortest; `print` shows them with the timeline.

    Args:
        tokens: rows that each weight is multiplied with in a step of one rank (batch times length).
        flops: operations a second that the device reaches.
        link: between ranks.
        backward: measured seconds of the backward by the parameter's name, in the place of what `flops` says.
        caps: sizes to try, in MiB.

    Raises:
        BucketPlanError: nothing to plan, or more ranks than the simulation is made for.
    """
    infos = parameter_infos(model)
    if not infos or not caps:
        raise BucketPlanError("a plan needs parameters that learn, and caps to try")
    link = link or Link()
    measured = backward or {}
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    parts = []
    for info in infos:
        forward = 0.0 if info.looked_up else 2 * sizes[info.name] * tokens / flops
        whole = measured.get(info.name, 2 * forward)
        parts.append(Part(info.name, forward, whole, info.nbytes, 0.0 if info.looked_up else whole / 2))
    found = {}
    for cap in caps:
        buckets = plan_buckets(tables_before_weights(infos, cap), cap, min(1.0, cap))
        found[cap] = buckets, replicas(parts, [bucket.names for bucket in buckets], link, ranks)
    seconds = {cap: timeline.seconds for cap, (_, timeline) in found.items()}
    best = min(caps, key=lambda cap: (seconds[cap], -cap))
    return Plan(best, found[best][0], ranks, found[best][1], seconds)
