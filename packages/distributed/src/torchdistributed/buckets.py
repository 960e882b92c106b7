"""Which parameters DistributedDataParallel reduces together.

DDP fills buckets in the reverse of the order in which parameters were registered, because backward
produces gradients in about that order. The first bucket is small, so that communication starts early;
the others hold `cap_mib`. A bucket is closed by the parameter that fills it to its limit or beyond it.
Parameters of different dtype or device never share a bucket (they are reduced from one flat buffer).
Source: Li et al., PyTorch Distributed, VLDB 2020, section 4.2.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from torchdistributed.errors import BucketPlanError

MIB = 1 << 20
_WAITING = 0.5  # bytes of weights whose gradients wait for a table's, by the table's


@dataclass(frozen=True, slots=True)
class ParameterInfo:
    """What planning needs of a parameter.

    Attributes:
        nbytes: its size in bytes.
        looked_up: an embedding's table, of which rows are read and nothing is multiplied.
    """

    name: str
    nbytes: int
    dtype: torch.dtype
    device: torch.device
    looked_up: bool = False


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
    tables = {id(m.weight) for m in module.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag)) and not m.sparse}
    return tuple(
        ParameterInfo(name, p.numel() * p.element_size(), p.dtype, p.device, id(p) in tables)
        for name, p in module.named_parameters()
        if p.requires_grad and name not in skip
    )


def tables_before_weights(
    parameters: Sequence[ParameterInfo], cap_mib: float = 25.0, within: Container[str] | None = None
) -> tuple[ParameterInfo, ...]:
    """`parameters`, but each table that fills a bucket stands behind weights that were registered after it, so that in
    the reverse order, that of gradients, it comes before them.

    The gradient of a table needs the whole backward of what its rows went through. Where it comes last, as it was
    registered first, it is sent when nothing is left to compute. But the products that give the weights of these layers
    their gradients can wait: only the optimizer reads them. A table that comes before them is sent beside them. With
    thousands of rows the products of a weight take longer than to send it, so that half of the table's bytes suffice;
    what they read is kept for as long.

    Args:
        cap_mib: of a bucket, in MiB. A smaller table stays where it is: what it shares a bucket with would wait for it.
        within: names of parameters whose gradients one graph computes; others stay in their order. None: all.
    """
    order = list(parameters)
    for table in parameters:
        if not table.looked_up or table.nbytes < cap_mib * MIB or (within is not None and table.name not in within):
            continue
        place = order.index(table)
        waiting, end = 0, place + 1
        while end < len(order) and waiting < _WAITING * table.nbytes:
            if within is not None and order[end].name not in within:
                break
            waiting += 0 if order[end].looked_up else order[end].nbytes
            end += 1
        order.insert(end - 1, order.pop(place))
    return tuple(order)


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
