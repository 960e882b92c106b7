"""Compiled graphs that fit DDP's buckets: planning them, splitting graphs, following the reducer."""

from torchdistributed.buckets import Bucket, ParameterInfo, parameter_infos, plan_buckets
from torchdistributed.errors import BucketPlanError
from torchdistributed.replicas import (
    FollowsReducer,
    ReducerPlan,
    active_replica,
    is_parameter,
    reducer_plan,
    stages_for,
)
from torchdistributed.split import assign_pieces, split_at_buckets

__version__ = "0.1.0"

__all__ = [
    "Bucket",
    "BucketPlanError",
    "FollowsReducer",
    "ParameterInfo",
    "ReducerPlan",
    "active_replica",
    "assign_pieces",
    "is_parameter",
    "parameter_infos",
    "plan_buckets",
    "reducer_plan",
    "split_at_buckets",
    "stages_for",
]
