"""Compiled graphs under DistributedDataParallel: their backward comes in the reducer's buckets.

The reducer sends a bucket as soon as autograd has the gradients of all its parameters. A compiled backward that gives
all gradients at its end leaves nothing to send beside; one that comes in stages, a bucket each, does. Which parameters
share a bucket is the reducer's to say: it begins with a plan by size, and makes another after the first backward, in
the order in which gradients came.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from torchdistributed.buckets import (
    MIB,
    Bucket,
    ParameterInfo,
    parameter_infos,
    plan_buckets,
    tables_before_weights,
)

Stages = tuple[tuple[int, ...], ...]  # inputs of a graph, by the bucket that their gradients go to, in its order
Runner = Callable[..., Sequence[object]]
_FIRST_BYTES = MIB  # of the first bucket, where the program gives no size (torch before 2.13 does not tell)
_MOST_PLANS = 4  # that one graph follows: it is compiled for each


@dataclass(frozen=True, slots=True)
class ReducerPlan:
    """The buckets of a replicated model.

    Attributes:
        final: the reducer keeps to them. It has not told yet where this is not so.
        places: by a parameter's identity: the parameter, its bucket, and its place there.
    """

    buckets: tuple[Bucket, ...]
    final: bool
    places: Mapping[int, tuple[weakref.ref[torch.Tensor], int, int]] = field(default_factory=dict, repr=False)

    def place_of(self, value: object) -> tuple[int, int] | None:
        """The bucket of one of the model's parameters and its place there; None for anything else."""
        known = self.places.get(id(value))
        return known[1:] if known is not None and known[0]() is value else None


# What was told of each model, by the text in which the reducer tells of the buckets that it has made: every graph of a
# model asks in every call until they are final.
_PLANS: weakref.WeakKeyDictionary[DistributedDataParallel, tuple[str, ReducerPlan]] = weakref.WeakKeyDictionary()


def active_replica() -> DistributedDataParallel | None:
    """The DistributedDataParallel whose forward this thread's process is in: what torch tells compilers of it."""
    return DistributedDataParallel._get_active_ddp_module()  # type: ignore[no-any-return, no-untyped-call]


def reducer_plan(replicated: DistributedDataParallel, inputs: Sequence[object] = ()) -> ReducerPlan:
    """The buckets that the reducer has; before it has made them, those that it will make of gradients that come in the
    reverse of the order of registration, but for large tables, which come before the weights of the layers that read
    them where the first graph that asks has both (`tables_before_weights`).

    Args:
        inputs: of a graph that asks.
    """
    told: Mapping[str, object] = replicated._get_ddp_logging_data()
    rebuilt = str(told.get("rebuilt_per_bucket_param_indices", ""))
    known = _PLANS.get(replicated)
    if known is None or known[0] != rebuilt:
        buckets, final = _buckets(replicated, rebuilt, set(map(id, inputs)))
        by_name = dict(replicated.module.named_parameters())
        places = {
            id(by_name[name]): (weakref.ref(by_name[name]), bucket.index, place)
            for bucket in buckets
            for place, name in enumerate(bucket.names)
        }
        known = _PLANS[replicated] = rebuilt, ReducerPlan(buckets, final, places)
    return known[1]


def _buckets(replicated: DistributedDataParallel, rebuilt: str, graph: Set[int]) -> tuple[tuple[Bucket, ...], bool]:
    """The buckets, and whether they are final. `graph`: identities of inputs of the graph that asks."""
    parameters = parameter_infos(replicated.module, replicated.parameters_to_ignore)
    if rebuilt:
        groups = [[int(number) for number in group.split()] for group in rebuilt.split(",")]
        if sorted(number for group in groups for number in group) == list(range(len(parameters))):
            found = (tuple(parameters[number] for number in group) for group in groups)
            return tuple(map(Bucket, range(len(groups)), found)), True
    cap, first = _caps(replicated)
    if _in_order_of_registration(replicated):
        buckets = plan_buckets(parameters[::-1], cap, first)[::-1]
        return tuple(Bucket(number, bucket.parameters[::-1]) for number, bucket in enumerate(buckets)), True
    within = {name for name, parameter in replicated.module.named_parameters() if id(parameter) in graph}
    return plan_buckets(tables_before_weights(parameters, cap, within), cap, first), False


def _caps(replicated: DistributedDataParallel) -> tuple[float, float]:
    """MiB of a bucket, and of the first."""
    settings = getattr(replicated, "_bucket_config", None)
    by_default = _FIRST_BYTES if getattr(replicated, "bucket_bytes_cap_default", False) else replicated.bucket_bytes_cap
    return replicated.bucket_bytes_cap / MIB, getattr(settings, "first_bucket_bytes_cap", by_default) / MIB


def _in_order_of_registration(replicated: DistributedDataParallel) -> bool:
    """Whether buckets are never made anew."""
    return bool(replicated.find_unused_parameters and not replicated.static_graph)


def weights_behind_tables(replicated: DistributedDataParallel) -> list[torch.Tensor]:
    """The weights whose gradients come behind that of a table where one graph computes both: see
    `tables_before_weights`."""
    if _in_order_of_registration(replicated):
        return []
    parameters = parameter_infos(replicated.module, replicated.parameters_to_ignore)
    order = tables_before_weights(parameters, _caps(replicated)[0])
    place = {parameter.name: at for at, parameter in enumerate(order)}
    by_name = dict(replicated.module.named_parameters())
    found: dict[str, torch.Tensor] = {}
    for at, table in enumerate(parameters):
        behind = (p.name for p in parameters[at + 1 :] if table.looked_up and place[p.name] < place[table.name])
        found.update((name, by_name[name]) for name in behind)
    return list(found.values())


def stages_for(plan: ReducerPlan, inputs: Sequence[object]) -> Stages:
    """The places of a graph's inputs by the bucket that they belong to, in the order in which the bucket has them: the
    reducer makes its buckets of the order in which gradients come, and finds these again. Empty where none is:
    one parameter of the graph in one bucket."""
    held: dict[int, list[tuple[int, int]]] = {}
    for place, value in enumerate(inputs):
        found = plan.place_of(value)
        if found is not None:
            held.setdefault(found[0], []).append((found[1], place))
    if len(plan.buckets) < 2 and sum(map(len, held.values())) < 2:
        return ()
    return tuple(tuple(place for _, place in sorted(held[bucket])) for bucket in sorted(held))


def stage_parameters(plan: ReducerPlan, inputs: Sequence[object]) -> list[tuple[int, list[ParameterInfo]]]:
    """For each stage, its bucket's number and the parameters of the graph in it."""
    held: dict[int, list[int]] = {}
    for bucket, place in filter(None, map(plan.place_of, inputs)):
        held.setdefault(bucket, []).append(place)
    return [(bucket, [plan.buckets[bucket].parameters[p] for p in sorted(held[bucket])]) for bucket in sorted(held)]


@dataclass(slots=True)
class Followed:
    """What one graph runs for some parameters: layers that are built alike share a graph, each with its buckets."""

    first: weakref.ref[torch.Tensor]  # of the parameters
    replicated: weakref.ref[DistributedDataParallel]
    stages: Stages
    run: Runner
    final: bool
    plans: int


class FollowsReducer:
    """A compiled graph that is compiled again, once or twice, when the model it belongs to turns out to be replicated
    and when the reducer has made its buckets.

    Args:
        compile: the graph, with its backward in these stages, for inputs like these.
        tell: called with what was cut and where.
        inputs: the first call's; at least one is a parameter.
    """

    def __init__(
        self,
        compile: Callable[[Stages, Sequence[object]], Runner],
        tell: Callable[[list[tuple[int, list[ParameterInfo]]], bool], None],
        inputs: Sequence[object],
    ) -> None:
        self.compile, self.tell = compile, tell
        self._parameter = [is_parameter(value) for value in inputs].index(True)  # who it is says whose call it is
        self._runs: dict[tuple[frozenset[int], ...], Runner] = {}  # whatever the order within a bucket
        self._followed: dict[int, Followed] = {}
        self._lock = threading.RLock()
        replicated = active_replica()
        if replicated is not None:
            self.follow(replicated, inputs)
        else:
            self._compiled((), inputs)
        self._run = next(iter(self._runs.values()))

    def __call__(self, *inputs: object) -> Sequence[object]:
        replicated = active_replica()
        if replicated is None:
            return self._run(*inputs)
        parameter = inputs[self._parameter]
        known = self._followed.get(id(parameter))
        if not (known and known.final and known.first() is parameter and known.replicated() is replicated):
            known = self.follow(replicated, inputs)
        return known.run(*inputs)

    def _compiled(self, stages: Stages, inputs: Sequence[object]) -> Runner:
        key = tuple(map(frozenset, stages))
        if key not in self._runs:
            self._runs[key] = self.compile(stages, inputs)
        return self._runs[key]

    def follow(self, replicated: DistributedDataParallel, inputs: Sequence[Any]) -> Followed:
        """Compiles the graph for the buckets that the reducer has now, if they are others."""
        with self._lock:
            parameter, plan = inputs[self._parameter], reducer_plan(replicated, inputs)
            stages, plans = stages_for(plan, inputs), 0
            known = self._followed.get(id(parameter))
            if known is None:
                self._followed = {key: other for key, other in self._followed.items() if other.first() is not None}
            elif known.first() is parameter:
                plans = known.plans + (set(map(frozenset, stages)) != set(map(frozenset, known.stages)))
                if plans > _MOST_PLANS:
                    stages = known.stages
            run = self._compiled(stages, inputs)
            made = Followed(weakref.ref(parameter), weakref.ref(replicated), stages, run, plan.final, plans)
            self._followed[id(parameter)] = made
            if len(stages) > 1:
                self.tell(stage_parameters(plan, inputs), plan.final)
            return made


def is_parameter(value: object) -> bool:
    """Whether autograd keeps a gradient for an input of a graph."""
    return isinstance(value, torch.Tensor) and value.requires_grad and value.is_leaf
