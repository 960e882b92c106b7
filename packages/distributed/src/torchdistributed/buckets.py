"""Which parameters DistributedDataParallel reduces together.

DDP fills buckets in the reverse of the order in which parameters were registered, because backward
produces gradients in about that order. The first bucket is small, so that communication starts early;
the others hold `cap_mib`. A bucket is closed by the parameter that fills it to its limit or beyond it.
Parameters of different dtype or device never share a bucket (they are reduced from one flat buffer).
Source: Li et al., PyTorch Distributed, VLDB 2020, section 4.2.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from torchdistributed.errors import BucketPlanError

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class ParameterInfo:
    """What planning needs of a parameter. `nbytes`: its size in bytes."""

    name: str
    nbytes: int
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True, slots=True)
class Bucket:
    """Parameters reduced together, in the order in which they were added (reverse registration order)."""

    index: int
    parameters: tuple[ParameterInfo, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters' names, in the order of reduction."""
        return tuple(parameter.name for parameter in self.parameters)

    @property
    def nbytes(self) -> int:
        """Bytes of all its gradients."""
        return sum(parameter.nbytes for parameter in self.parameters)


def parameter_infos(module: torch.nn.Module, ignored: Iterable[str] = ()) -> tuple[ParameterInfo, ...]:
    """The trainable parameters of `module` in registration order, each shared one once; names in `ignored` left out."""
    skip = frozenset(ignored)
    return tuple(
        ParameterInfo(name, p.numel() * p.element_size(), p.dtype, p.device)
        for name, p in module.named_parameters()
        if p.requires_grad and name not in skip
    )


def plan_buckets(
    parameters: Sequence[ParameterInfo], cap_mib: float = 25.0, first_mib: float = 1.0
) -> tuple[Bucket, ...]:
    """Buckets for `parameters` (registration order), in the order in which backward fills them.

    `cap_mib` and `first_mib` are limits in MiB, DDP's `bucket_cap_mb` and the size of its first bucket.
    Raises `BucketPlanError` for limits that are not positive and for names given twice.
    """
    if cap_mib <= 0 or first_mib <= 0:
        raise BucketPlanError(f"bucket limits are in MiB and positive; got cap_mib={cap_mib}, first_mib={first_mib}")
    seen: set[str] = set()
    for parameter in parameters:
        if parameter.name in seen:
            raise BucketPlanError(f"parameter {parameter.name!r} is listed twice")
        seen.add(parameter.name)

    open_buckets: dict[tuple[torch.dtype, torch.device], list[ParameterInfo]] = {}
    closed: list[tuple[ParameterInfo, ...]] = []
    limits: dict[tuple[torch.dtype, torch.device], float] = {}
    filled: dict[tuple[torch.dtype, torch.device], int] = {}
    for parameter in reversed(parameters):
        kind = (parameter.dtype, parameter.device)
        open_buckets.setdefault(kind, []).append(parameter)
        filled[kind] = filled.get(kind, 0) + parameter.nbytes
        if filled[kind] >= limits.get(kind, first_mib) * MIB:
            closed.append(tuple(open_buckets.pop(kind)))
            filled[kind] = 0
            limits[kind] = cap_mib
    closed.extend(tuple(bucket) for bucket in open_buckets.values())
    order = {parameter.name: i for i, parameter in enumerate(reversed(parameters))}
    closed.sort(key=lambda bucket: order[bucket[-1].name])
    return tuple(Bucket(i, bucket) for i, bucket in enumerate(closed))
