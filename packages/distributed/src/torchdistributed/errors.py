"""Errors of this package."""

from __future__ import annotations

from torchdynamo.errors import TorchDynamoError


class BucketPlanError(ValueError):
    """Bucket sizes, parameters or a graph that no bucket plan can be made from."""


class CollectivesDiffer(TorchDynamoError):
    """Ranks were about to call different collectives, and to wait for each other."""


class RankFailed(TorchDynamoError):
    """Another rank raised or died while it compiled: there is nobody to talk to."""
