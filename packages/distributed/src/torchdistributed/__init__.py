"""Compiled graphs that fit DDP's buckets: planning them, splitting graphs, following the reducer."""

from torchdistributed.agreement import agreed, collectives_of
from torchdistributed.buckets import Bucket, ParameterInfo, parameter_infos, plan_buckets
from torchdistributed.compilations import told_to_ranks
from torchdistributed.errors import BucketPlanError, CollectivesDiffer, RankFailed
from torchdistributed.planning import Plan, plan
from torchdistributed.replicas import (
    FollowsReducer,
    ReducerPlan,
    active_replica,
    is_parameter,
    reducer_plan,
    stages_for,
)
from torchdistributed.rounds import ReplicaRounds, forms
from torchdistributed.simulate import Link, Part, Span, Timeline
from torchdistributed.simulate import replicas as simulate_replicas
from torchdistributed.simulate import shards as simulate_shards
from torchdistributed.split import assign_pieces, split_at_buckets

__version__ = "0.1.0"

__all__ = [
    "Bucket",
    "BucketPlanError",
    "CollectivesDiffer",
    "FollowsReducer",
    "Link",
    "ParameterInfo",
    "Part",
    "Plan",
    "RankFailed",
    "ReducerPlan",
    "ReplicaRounds",
    "Span",
    "Timeline",
    "active_replica",
    "agreed",
    "assign_pieces",
    "collectives_of",
    "forms",
    "is_parameter",
    "parameter_infos",
    "plan",
    "plan_buckets",
    "reducer_plan",
    "simulate_replicas",
    "simulate_shards",
    "split_at_buckets",
    "stages_for",
    "told_to_ranks",
]
