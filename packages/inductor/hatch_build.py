"""The build hook of this distribution: it makes the C++ extension."""

from primtorch.building import BuildHook

__all__ = ["BuildHook"]
