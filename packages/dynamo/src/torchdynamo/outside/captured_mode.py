"""The modes that make tensors fake while a program is captured."""

from __future__ import annotations

from types import TracebackType
from typing import Self

import torch

from primtorch.fake import ASKED, FakeMode, FakeTensor
from primtorch.operators.build import refuse_fresh
from primtorch.symbolic import ShapeEnv
from torchdynamo.reasons import BreakGraph


class CapturedMode(FakeMode):
    """Has no text for a tensor while a program runs that would take it for its own, and refuses what eager refuses."""

    rules = ASKED

    def __init__(self, shape_env: ShapeEnv) -> None:
        super().__init__(shape_env)
        self._entered = 0

    def __enter__(self) -> Self:
        self._entered += 1
        return super().__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._entered -= 1
        super().__exit__(kind, error, traceback)

    def text_of(self, fake: FakeTensor) -> str:
        if self._entered:
            raise BreakGraph("tensor_repr", "the text of what holds a tensor")
        return super().text_of(fake)


class KnownSizes(CapturedMode):
    """Refuses operators whose result has a size that only the data tells."""

    def fresh_size(self, maximum: int | torch.SymInt | None, minimum: int | torch.SymInt = 0) -> int | torch.SymInt:
        return refuse_fresh(maximum, minimum)
