"""What the program writes to, memory and objects, is nothing else that it knows under another name."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import torch

from primtorch.fake import FakeTensor
from primtorch.wrappers import is_wrapper
from torchdynamo.outside.externals import IDENTITY_TYPES, External
from torchdynamo.outside.outside import Outside
from torchdynamo.reasons import BreakGraph
from torchdynamo.schemas import GuardKind, WrittenMemory
from torchdynamo.sources import Pinned, Source


def guard_written_memory(outside: Outside) -> tuple[Source, Source] | None:
    """Guards that what the program writes to shares no memory with its other inputs. Gives two that do now, if any."""
    memories = _memories(outside.recorder.written)
    written = [(source, tensor) for source, tensor, fake in outside.tensors if id(fake.memory) in memories]
    rest = [*outside.tensors, *outside.wrappers.parts]
    others = [(source, tensor) for source, tensor, fake in rest if id(fake.memory) not in memories]
    others = [(source, tensor) for source, tensor in others if not is_wrapper(type(tensor))]  # its parts are among them
    if not written or len(rest) < 2:
        return None
    found = overlapping([tensor for _, tensor in written], [tensor for _, tensor in others])
    if found is not None:
        first, second = sorted(found)
        sources = [source for source, _ in (*written, *others)]
        return sources[first], sources[second]
    memory = WrittenMemory(tuple(source for source, _ in written), tuple(source for source, _ in others))
    outside.externals.guard(None, GuardKind.DISTINCT_STORAGE, memory)
    return None


def refuse_writes(outside: Outside, shared: Collection[Source]) -> None:
    """The graph ends before a write that is to be done for real: to the memory of the inputs `shared`, where the others
    see it; to an input that overlaps itself (an expanded one, windows), whose other elements see it; and to an
    inference tensor outside of inference mode, which eager refuses, there and then."""

    inputs = _InputsByMemory(outside)

    def refuse(written: Iterable[torch.Tensor]) -> None:
        inference = torch.is_inference_mode_enabled()
        for source, tensor in inputs.of(_memories(written)):
            if source in shared:
                raise BreakGraph("overlapping_inputs", f"a write to {source.expression()}, whose memory another shares")
            if _overlaps_itself(tensor):
                raise BreakGraph("overlapping_inputs", f"a write to {source.expression()}, which overlaps itself")
            if not inference and tensor.is_inference():
                raise BreakGraph("exception", f"a write to the inference tensor {source.expression()}")

    outside.recorder.on_write = refuse


class _InputsByMemory:
    """The inputs so far by the identities of their memories: a program may write as often as it has inputs."""

    def __init__(self, outside: Outside) -> None:
        self._outside = outside
        self._inputs: dict[int, list[tuple[int, Source, torch.Tensor]]] = {}
        self._seen = 0
        self._moved = 0

    def of(self, memories: Collection[int]) -> list[tuple[Source, torch.Tensor]]:
        """Those in these memories, in their order."""
        tensors, moved = self._outside.tensors, self._outside.mode.moved
        if moved != self._moved or len(tensors) < self._seen:
            self._inputs, self._seen, self._moved = {}, 0, moved
        for place, (source, tensor, fake) in enumerate(tensors[self._seen :], self._seen):
            self._inputs.setdefault(id(fake.memory), []).append((place, source, tensor))
        self._seen = len(tensors)
        found = sorted((one for memory in memories for one in self._inputs.get(memory, ())), key=lambda one: one[0])
        return [(source, tensor) for _, source, tensor in found]


def written_inputs(outside: Outside) -> list[tuple[Source, torch.Tensor]]:
    """The inputs that the program writes to, or gives another shape in place."""
    memories = _memories([*outside.recorder.written, *outside.recorder.restrided])
    return [(source, tensor) for source, tensor, fake in outside.tensors if id(fake.memory) in memories]


def _memories(tensors: Iterable[torch.Tensor]) -> set[int]:
    return {id(fake.memory) for fake in tensors if isinstance(fake, FakeTensor)}


def guard_written_objects(outside: Outside, written: Sequence[External]) -> None:
    """Guards that an object which the program writes to is none of the others of its type.

    What it wrote would be read under the other name, too: an attribute, an item, a tensor's shape. Names that meant one
    object are guarded where they are read.
    """
    externals = outside.externals
    reshaped = [known for known in map(externals.lookup, outside.recorder.restrided) if known is not None]
    for kind in dict.fromkeys(type(known.original) for known in (*written, *reshaped)):
        if issubclass(kind, IDENTITY_TYPES):
            continue
        sources = [known.source for known in externals.by_original.values() if type(known.original) is kind]
        if len(sources) > 1 and not all(isinstance(source, Pinned) for source in sources):
            externals.guards.add(sources[0], GuardKind.ALL_DISTINCT, tuple(sources[1:]))


def overlapping(written: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> tuple[int, int] | None:
    """Places in `(*written, *others)` of two tensors, one of them written, whose address ranges touch.

    That is an upper bound of true overlap. The ranges are met in the order in which they begin.
    """
    ranges = sorted(
        (str(tensor.device), *_address_range(tensor), place)
        for place, tensor in enumerate((*written, *others))
        if tensor.numel() and tensor.data_ptr()
    )
    furthest = furthest_written = ("", 0, -1)  # device, end, place of the ranges so far
    for device, begin, end, place in ranges:
        ahead = furthest if place < len(written) else furthest_written
        if ahead[0] == device and begin < ahead[1]:
            return ahead[2], place
        if (device, end) > furthest[:2]:
            furthest = (device, end, place)
        if place < len(written) and (device, end) > furthest_written[:2]:
            furthest_written = (device, end, place)
    return None


def _overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether two elements may be one place: not where each dim's stride passes all that the smaller ones reach."""
    if tensor.layout is not torch.strided or tensor.is_contiguous() or not tensor.numel():
        return False
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride <= reach:
            return True
        reach += (size - 1) * stride
    return False


def _address_range(tensor: torch.Tensor) -> tuple[int, int]:
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (reach + 1) * tensor.element_size()
