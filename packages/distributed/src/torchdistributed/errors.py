"""Errors of this package."""

from __future__ import annotations


class BucketPlanError(ValueError):
    """Bucket sizes, parameters or a graph that no bucket plan can be made from."""
