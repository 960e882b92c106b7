"""What the rooms of tensors that are made of plain ones have in common: nested and quantised tensors."""

from __future__ import annotations

from collections.abc import Iterator

from torchdynamo.reasons import BreakGraph


def leaves(value: object) -> Iterator[object]:
    """What is in tuples, lists and dicts, at any depth."""
    if isinstance(value, (tuple, list)):
        for item in value:
            yield from leaves(item)
    elif isinstance(value, dict):
        yield from leaves(tuple(value.values()))
    else:
        yield value


def refusal(call: str, kind: str, error: BaseException) -> BreakGraph:
    """The break where a call of a tensor of a kind, "nested", is not taken for the reason that the error gives."""
    said = f"{type(error).__name__}: {error}".partition("\n")[0]
    return BreakGraph("special_tensor", f"{call}() of a {kind} tensor: {said}")
