"""Calls of the operator database that eager may refuse, and whether a mode that asks refuses the same."""

from __future__ import annotations

import random
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from opdb_replay import copies
from torch.testing._internal import common_methods_invocations
from torch.utils import _pytree as pytree

from primtorch.errors import DataDependent, NoFormula
from primtorch.fake import ASKED, FakeMode
from primtorch.symbolic import ShapeEnv

DTYPES = (
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
    torch.float32, torch.float64, torch.complex64, torch.complex128,
)  # fmt: skip
BASES = (torch.float32, torch.int64, torch.bool, torch.complex64, *DTYPES)
FORMS = ("function", "derivable", "in place", "out")
LARGEST = 20_000
OUTSIDE = {
    "nn.functional.linear_cross_entropy": "operators of `torch_nn`, a library that is not ATen",
    "nn.functional.max_pool1d": "a program of operators with a kernel of its own for tensors that are not derived",
    "_segment_reduce": "lengths that sum to a size; it has no rule, so the kernel itself runs",
    "nn.functional.ctc_loss": "lengths that fit the sizes; it has no rule, so the kernel itself runs",
}
"""Operators that a mode does not ask about, and why."""
NO_DATA = "data is not allocated yet"


class Asking(FakeMode):
    rules = ASKED


class Call:
    """A sample with other leaves, by one of `FORMS`; `plain` are its own."""

    def __init__(
        self, op: Any, form: str, what: str, leaves: list[Any], tree: Any, plain: list[Any], out: torch.dtype | None
    ) -> None:
        self.op, self.form, self.what = op, form, what
        self.leaves, self.tree, self.plain, self.out = leaves, tree, plain, out

    def __str__(self) -> str:
        out = "" if self.out is None else f", out= of {self.out}"
        return f"{self.op.name}.{self.op.variant_test_name} {self.form}, {self.what}{out}"

    def with_leaves(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Call:
        """With other elements in its tensors."""
        leaves = [change(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in self.leaves]
        return Call(self.op, self.form, self.what, leaves, self.tree, self.plain, self.out)

    def run(self, mode: FakeMode | None) -> Exception | None:
        """The error of the call on copies of its tensors, or on fakes of them, or None."""

        def given(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            (leaf,) = copies([leaf.detach()])
            derivable = leaf.is_floating_point() or leaf.is_complex()
            leaf.requires_grad_(self.form == "derivable" and derivable)
            return leaf if mode is None else mode.from_tensor(leaf)

        torch.manual_seed(0)
        first, args, kwargs = pytree.tree_unflatten([given(leaf) for leaf in self.leaves], self.tree)
        function = self.op.inplace_variant if self.form == "in place" else self.op.op
        if self.form == "out":
            kwargs["out"] = pytree.tree_map(given, self.outs())
        try:
            with mode or nullcontext():
                function(first, *args, **kwargs)
        except Exception as error:  # of any type: it is what is compared
            return error
        return None

    def outs(self) -> Any:
        """Memory of the shapes of a call of the sample as it is, of another dtype if there is one."""
        first, args, kwargs = pytree.tree_unflatten(self.plain, self.tree)
        made = self.op.op(first, *args, **kwargs)
        return pytree.tree_map_only(torch.Tensor, lambda t: torch.zeros(t.shape, dtype=self.out or t.dtype), made)


def forms(op: Any) -> Iterator[str]:
    """Those that it has."""
    for form in FORMS:
        if not ((form == "in place" and op.inplace_variant is None) or (form == "out" and not op.supports_out)):
            yield form


def drawn(op: Any) -> tuple[torch.dtype, list[Any]]:
    """Two small samples with elements, and the dtype that they were made for."""
    for base in (base for base in BASES if base in op.supported_dtypes("cpu")):
        try:
            samples = [s for s in op.sample_inputs("cpu", base, requires_grad=False) if is_small(s)]
        except Exception:  # this dtype has no samples, whatever supported_dtypes says
            continue
        if samples:
            return base, [samples[0], *samples[1:][len(samples) // 2 : len(samples) // 2 + 1]]
    return torch.float32, []


def is_small(sample: Any) -> bool:
    leaves = pytree.tree_leaves((sample.input, sample.args, sample.kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    return all(t.layout is torch.strided and 0 < t.numel() < LARGEST for t in tensors)


def difference(call: Call, is_of_values: Callable[[Call, Exception], bool]) -> str | None:
    """How a mode that asks differs from eager, if it does. What ends a graph instead, eager runs, and says so; what
    eager refuses for the elements, as `is_of_values` knows it, the program refuses when it runs."""
    real, fake = call.run(None), call.run(Asking(ShapeEnv()))
    if isinstance(fake, (DataDependent, NoFormula)) or NO_DATA in str(fake):
        return None
    if type(real) is type(fake) or (fake is None and real is not None and is_of_values(call, real)):
        return None
    return f"{call}: eager {real!r}, fake {fake!r}"[:600]


def differences(
    ops: Iterable[Any],
    calls: Callable[[Any], Iterator[Call]],
    is_of_values: Callable[[Call, Exception], bool],
    seconds: float = float("inf"),
) -> list[str]:
    """Of these operators' calls, as many as are made in the time."""
    until, found = time.monotonic() + seconds, []
    for op in ops:
        if op.name in OUTSIDE or time.monotonic() > until:
            continue
        found += filter(None, (difference(call, is_of_values) for call in calls(op)))
    return found


@contextmanager
def as_users_call() -> Iterator[None]:
    """The database's random operators seed the generator around their call."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        patch.setattr(common_methods_invocations, "wrapper_set_seed", lambda op, *args, **kwargs: op(*args, **kwargs))
        warnings.simplefilter("ignore")
        yield


@pytest.fixture(autouse=True)
def as_a_user_calls() -> Iterator[None]:
    """Every test of the module that imports it."""
    with as_users_call():
        yield


def seed_of_now() -> tuple[int, random.Random]:
    """A fresh seed, to be printed, and what draws from it."""
    seed = time.time_ns() % 2**32
    return seed, random.Random(seed)
