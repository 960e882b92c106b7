"""DDP bucket planning and bucket-aligned splitting of captured graphs."""

from torchdistributed.buckets import Bucket, ParameterInfo, parameter_infos, plan_buckets
from torchdistributed.errors import BucketPlanError
from torchdistributed.split import assign_pieces, split_at_buckets

__version__ = "0.1.0"

__all__ = [
    "Bucket",
    "BucketPlanError",
    "ParameterInfo",
    "assign_pieces",
    "parameter_infos",
    "plan_buckets",
    "split_at_buckets",
]
