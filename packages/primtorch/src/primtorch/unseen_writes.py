"""Writes that autograd does not see: under `no_grad`, by `.data`, to a detached alias.

In eager they change values, and gradients go where they went. In a trace the memory's value is made of what was written
and of the history that it had (`with_history`). That cannot be said where two tensors of one memory have histories of
their own, and of what autograd has kept for a derivative, which would read there what is written now.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator

import torch
from torch._C._autograd import SavedTensor

from primtorch.errors import TraceError
from primtorch.fake import FakeTensor
from primtorch.histories import step_of


def memory(tensor: torch.Tensor) -> object:
    """What tensors have in common that share memory."""
    if isinstance(tensor, FakeTensor):
        return tensor.memory
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else id(tensor)


def owner_of_history(alive: Iterable[torch.Tensor], written: torch.Tensor, line: str) -> torch.Tensor | None:
    """The tensor whose history that of all aliases of what is written is a view's of; None where none has one.

    Raises:
        TraceError: a graph without writes cannot say what gradients are behind the write.
    """
    alive = list(alive)
    owners = _owners(alive, written)
    if len(owners) > 1:
        raise _refusal("where autograd records nothing, to memory that two tensors have histories for", line)
    # A write that is counted has a derivative raise that kept what had no history, in eager as well.
    read = owners or _is_uncounted(alive, written)
    if read and (_is_kept(alive, memory(written)) or _is_read_again(alive, memory(written))):
        raise _refusal(
            "where autograd records nothing, to a tensor that a derivative reads which it has recorded", line
        )
    return owners[0] if owners else None


def refuse_second_history(alive: Iterable[torch.Tensor], written: torch.Tensor, line: str) -> None:
    """Raises TraceError where a write that autograd sees gives a detached alias a history beside that of the memory."""
    if any(owner is not _owner(written) for owner in _owners(alive, written)):
        raise _refusal("to a detached alias, which gets a history beside that of the tensor", line)


def _owner(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._base if tensor._is_view() and tensor._base is not None else tensor


def _owners(alive: Iterable[torch.Tensor], written: torch.Tensor) -> list[torch.Tensor]:
    """The tensors of its memory that have histories, those aside that have them as views."""
    place = memory(written)
    of = [_owner(t) for t in alive if place is not None and t.requires_grad and memory(t) == place]
    return list({id(owner): owner for owner in of}.values())


def _is_uncounted(alive: Iterable[torch.Tensor], written: torch.Tensor) -> bool:
    """Whether some tensor of what is written does not learn of the write, as of one by `.data`."""
    if written.is_inference():
        return False
    place = memory(written)
    aliases = [t for t in alive if t is not written and memory(t) == place and not t.is_inference()]
    versions = [t._version for t in aliases]
    with torch.autograd._unsafe_preserve_version_counter(written):  # type: ignore[attr-defined]
        torch.autograd.graph.increment_version(written)
        return any(t._version == version for t, version in zip(aliases, versions, strict=True))


def _refusal(what: str, line: str) -> TraceError:
    return TraceError(
        f"the program writes {what}{line}: in a graph of operators its gradients "
        "would be others. Compute a new tensor instead, or trace under torch.no_grad()"
    )


def _is_kept(alive: Iterable[torch.Tensor], place: object) -> bool:
    """Whether autograd keeps what lies there for a derivative."""
    return any(memory(kept) == place for tensor in alive for kept in _kept_by(tensor))


def _is_read_again(alive: Iterable[torch.Tensor], place: object) -> bool:
    """Whether a function that gives a derivative what it reads, as a checkpoint's does by running again, may read what
    lies there: anything that there was before."""
    behind = itertools.dropwhile(lambda tensor: memory(tensor) != place, alive)
    saved = itertools.chain.from_iterable(map(_saved_by, behind))
    return any(value.unpack_hook is not None for value in saved)  # type: ignore[attr-defined]


def _saved_by(tensor: torch.Tensor) -> Iterator[SavedTensor]:
    """As autograd has stored it; nothing of what was freed."""
    step = step_of(tensor)
    for name in (name for name in dir(step) if name.startswith("_raw_saved_")):
        with contextlib.suppress(RuntimeError):
            value = getattr(step, name)
            yield from value if isinstance(value, (tuple, list)) else (value,)


def _kept_by(tensor: torch.Tensor) -> list[torch.Tensor]:
    """What autograd keeps for the derivative of a tensor's last operator."""
    step = step_of(tensor)
    if step is None:
        return []
    names = [name for name in dir(step) if name.startswith("_saved_")] or ["saved_tensors"]
    found: list[torch.Tensor] = []
    for name in names:
        try:
            value = getattr(step, name, None)
        except RuntimeError:  # it was freed, or written to where autograd saw it
            continue
        found += [t for t in (value if isinstance(value, (tuple, list)) else (value,)) if isinstance(t, torch.Tensor)]
    return found
