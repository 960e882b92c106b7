"""Memory that the graph writes to: no other input of it may lie there, since a back end may run it out of place."""

from __future__ import annotations

from primtorch.fake import FakeTensor
from torchdynamo.guards import overlapping
from torchdynamo.schemas import GuardKind, WrittenMemory
from torchdynamo.world import Outside


def guard_written_memory(outside: Outside) -> str | None:
    """Guards that what the program writes to shares no memory with its other inputs. Tells which do, if any now do."""
    memories = {id(fake.memory) for fake in outside.recorder.written if isinstance(fake, FakeTensor)}
    written = [(source, tensor) for source, tensor, fake in outside.tensors if id(fake.memory) in memories]
    others = [(source, tensor) for source, tensor, fake in outside.tensors if id(fake.memory) not in memories]
    if not written or len(outside.tensors) < 2:
        return None
    found = overlapping([tensor for _, tensor in written], [tensor for _, tensor in others])
    if found is not None:
        first, second = sorted(found)
        sources = [source for source, _ in (*written, *others)]
        return f"{sources[first].expression()} and {sources[second].expression()}"
    memory = WrittenMemory(tuple(source for source, _ in written), tuple(source for source, _ in others))
    outside.externals.guard(None, GuardKind.DISTINCT_STORAGE, memory)
    return None
