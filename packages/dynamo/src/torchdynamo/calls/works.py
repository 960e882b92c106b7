"""Work: what a program is given by a collective that it begins, `dist.all_reduce(x, async_op=True)`, to wait for later.

In the graph the node that begins and the one that waits stand where the program begins and waits; what nobody has
waited for is waited for at the graph's end. Only the graph knows its work: where an object that stands for it leaves
the graph, capture begins anew, and the graph ends before the collective, which is begun for real (`WorkOutlivesGraph`).
So it is with questions whose answer is another one at each call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from torchdynamo.calls.process_groups import called
from torchdynamo.interpreter.protocol import Args, Callee, Kwargs, Rule
from torchdynamo.outside.outside import Outside
from torchdynamo.reasons import BreakGraph


@dataclass(slots=True)
class Begun:
    """A collective that the graph has begun.

    Attributes:
        finish: waits, and writes to the collective's arguments; None once that is in the graph.
        written: what its work says that it gives, where all back ends say the same.
        settled: whether it is done, and says so, when it has been waited for. On a device it may go on.
    """

    finish: Callable[[], None] | None
    written: list[torch.Tensor] | None
    settled: bool


class Works:
    """The work of one capture."""

    def __init__(self, outside: Outside) -> None:
        self.recorder = outside.recorder
        self.refused = -1  # which of them has to be begun for real
        self._all: list[Begun] = []
        self._of: dict[int, Begun] = {}  # by the identity of what stands for it, which the recorder keeps

    def refuse(self, name: str) -> None:
        """Breaks before the collective whose work is seen outside of the graph."""
        if len(self._all) == self.refused:
            raise BreakGraph("distributed", f"the work of {name}() is kept, or asked for more than to wait")

    def begun(self, begun: Begun) -> object:
        """The work of what has been begun just now."""
        self._all.append(begun)
        return self._standing_for(torch.distributed.Work(), begun)

    def finish(self) -> int:
        """Waits for what nobody has waited for, at the graph's end. Gives the place of work that has no place in it,
        or -1."""
        recorder = self.recorder
        limits, recorder.cut_at, recorder.refused = (recorder.cut_at, recorder.refused), None, frozenset()
        try:
            for place, begun in enumerate(self._all):
                try:
                    self._wait(begun)
                except BreakGraph:
                    return place
        finally:
            recorder.cut_at, recorder.refused = limits
        return -1

    def rules(self) -> Iterator[tuple[object, Rule]]:
        """Methods of works and futures, and what calls of them mean."""
        if not torch.distributed.is_available():
            return
        for kind, answers in ((torch.distributed.Work, _OF_WORK), (torch._C.Future, _OF_FUTURES)):
            for name, member in vars(kind).items():
                if not name.startswith("__") and callable(member):
                    yield called(member), functools.partial(self._ask, kind.__name__, name, answers.get(name))

    def _ask(self, kind: str, name: str, answer: _Answer | None, fn: Callee, args: Args, kwargs: Kwargs) -> object:
        begun = self._of.get(id(args[0])) if args else None
        if begun is None:
            raise BreakGraph("distributed", f"call of {kind}.{name}")
        if answer is None or len(args) > 1 or kwargs:
            raise BreakGraph("distributed", f"{name}() of a collective's work")
        return answer(self, begun)

    def _standing_for(self, handle: object, begun: Begun) -> object:
        self._of[id(handle)] = begun
        place = next(place for place, known in enumerate(self._all) if known is begun)
        self.recorder.works[id(handle)] = handle, place
        return handle

    def _wait(self, begun: Begun) -> bool:
        if begun.finish is not None:
            if self.recorder.regions.open:
                raise BreakGraph("distributed", "wait() within a function that becomes a graph of its own")
            with torch.no_grad():
                begun.finish()
            begun.finish = None
        return True

    def _synchronize(self, begun: Begun) -> None:
        self._wait(begun)

    def _done(self, begun: Begun) -> bool:
        if begun.finish is not None or not begun.settled:
            raise BreakGraph("distributed", "whether a collective is done")
        return True

    def _exception(self, begun: Begun) -> None:
        self._done(begun)

    def _result(self, begun: Begun) -> list[torch.Tensor]:
        if begun.finish is not None or begun.written is None:
            raise BreakGraph("distributed", "what a collective gives")
        return list(begun.written)

    def _awaited(self, begun: Begun) -> list[torch.Tensor]:
        self._wait(begun)
        return self._result(begun)

    def _future(self, begun: Begun) -> object:
        if begun.written is None:
            raise BreakGraph("distributed", "get_future() of a collective's work")
        future: torch._C.Future[object] = torch._C.Future([])  # type: ignore[call-arg]
        return self._standing_for(future, begun)


_Answer = Callable[[Works, Begun], object]
_OF_WORK: dict[str, _Answer] = {
    "wait": Works._wait,
    "synchronize": Works._synchronize,
    "is_completed": Works._done,
    "is_success": Works._done,
    "exception": Works._exception,
    "result": Works._result,
    "get_future": Works._future,
}
_OF_FUTURES: dict[str, _Answer] = {"wait": Works._awaited, "done": Works._done, "value": Works._result}
