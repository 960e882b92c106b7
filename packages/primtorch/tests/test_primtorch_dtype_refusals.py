"""What eager refuses for its dtypes, a mode that asks refuses with the same error; what eager takes, it takes."""

from __future__ import annotations

import random
import time
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from opdb_replay import copies
from torch.testing._internal import common_methods_invocations
from torch.testing._internal.common_methods_invocations import op_db
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
    "_unsafe_masked_index": "indices of another shape where they are masks, of an operator that eager alone calls",
    "native_dropout_backward": "a derivative with a complex mask, which no forward makes",
}
"""Operators that a mode does not ask about, and why."""
VALUES = "ZeroDivisionError"  # of elements, when the program runs
NO_DATA = "data is not allocated yet"


class Asking(FakeMode):
    rules = ASKED


class Call:
    """A sample's leaves in other dtypes, by one of `FORMS`."""

    def __init__(self, op: Any, form: str, what: str, leaves: list[Any], tree: Any, out: torch.dtype) -> None:
        self.op, self.form, self.what, self.leaves, self.tree, self.out = op, form, what, leaves, tree, out

    def __str__(self) -> str:
        return f"{self.op.name}.{self.op.variant_test_name} {self.form}, {self.what}, out= of {self.out}"

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
        """Memory of the shapes of a call with tensors of the operator's own dtype."""
        first, args, kwargs = pytree.tree_unflatten(self.plain, self.tree)
        made = self.op.op(first, *args, **kwargs)
        return pytree.tree_map_only(torch.Tensor, lambda t: torch.zeros(t.shape, dtype=self.out), made)


def calls(op: Any, draw: random.Random) -> Iterator[Call]:
    """Two samples in every dtype, and with one tensor of another dtype than the others."""
    base, samples = drawn(op)
    for sample in samples:
        plain, tree = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
        tensors = [i for i, leaf in enumerate(plain) if isinstance(leaf, torch.Tensor)]
        alike = [i for i in tensors if plain[i].dtype is base]
        changes = [(alike, dtype) for dtype in DTYPES]
        changes += [([i], dtype) for i in tensors for dtype in draw.sample(DTYPES, 4) if len(tensors) > 1]
        for form in FORMS:
            if (form == "in place" and op.inplace_variant is None) or (form == "out" and not op.supports_out):
                continue
            for places, dtype in changes:
                leaves = [as_dtype(leaf, dtype) if i in places else leaf for i, leaf in enumerate(plain)]
                call = Call(op, form, f"{dtype} at {places} of {tensors}", leaves, tree, draw.choice((dtype, *DTYPES)))
                call.plain = plain
                yield call


def as_dtype(t: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The same place in memory of another dtype."""
    whole = torch.empty(0, dtype=t.dtype).set_(t.untyped_storage()).to(dtype)
    return whole.as_strided(t.shape, t.stride(), t.storage_offset())


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


def difference(call: Call) -> str | None:
    """How a mode that asks differs from eager, if it does. What ends a graph instead, eager runs, and says so."""
    real, fake = call.run(None), call.run(Asking(ShapeEnv()))
    if isinstance(fake, (DataDependent, NoFormula)) or NO_DATA in str(fake):
        return None
    if type(real) is type(fake) or (fake is None and VALUES in str(real)):
        return None
    return f"{call}: eager {real!r}, fake {fake!r}"[:600]


@pytest.fixture(autouse=True)
def as_a_user_calls(monkeypatch):
    """The database's random operators seed the generator around their call."""
    monkeypatch.setattr(common_methods_invocations, "wrapper_set_seed", lambda op, *args, **kwargs: op(*args, **kwargs))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def differences(ops: list[Any], seed: int, seconds: float = float("inf")) -> list[str]:
    until, draw, found = time.monotonic() + seconds, random.Random(seed), []
    for op in ops:
        if op.name in OUTSIDE or time.monotonic() > until:
            continue
        found += filter(None, map(difference, calls(op, draw)))
    return found


def test_slice_of_the_operator_database():
    seed = time.time_ns() % 2**32
    found = differences(random.Random(seed).sample(op_db, 30), seed, seconds=20)
    assert not found, "\n".join((f"seed {seed}", *found[:20]))


@pytest.mark.parametrize("shape", [(4,), (4, 2), (400, 2), (2, 900)])
def test_masks_beside_indices_of_as_many_elements(shape: tuple[int, ...]) -> None:
    """How many elements a mask selects is no matter of dtypes: it is not what it is in a mask that is made up."""
    mode = FakeMode(ShapeEnv())
    mode.rules = ASKED
    with mode:
        x, mask, places = torch.zeros(*shape, 3), torch.ones(shape, dtype=torch.bool), torch.zeros(shape).long()
        chosen = places[mask]
        x[mask, chosen] = 1.0


@pytest.mark.slow
@pytest.mark.parametrize("start", range(0, len(op_db), 110))
def test_whole_operator_database(start):
    found = differences(op_db[start : start + 110], start)
    assert not found, "\n".join((str(len(found)), *found[:40]))
