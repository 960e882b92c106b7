"""Copies that a forward keeps for its backward get rows that vector loads divide, where nobody else sees them."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from primtorch import prims
from primtorch.spec import TensorSpec
from torchinductor import InductorOptions
from torchinductor.ir import Kernel
from torchinductor.kept_rows import align_kept_rows
from torchinductor.lowering.context import ViewRef
from torchinductor.lowering.graph import lower_graph
from torchinductor.schemas import DeviceTraits, ProductRates

CPU = torch.device("cpu")
WANTS = DeviceTraits(products=ProductRates(alignment=16, aligned=1e9, unaligned=1e3, bandwidth=4e12))


def spec(*shape: int, dtype: torch.dtype = torch.bfloat16) -> TensorSpec:
    strides = [1]
    for size in shape[:0:-1]:
        strides.insert(0, strides[0] * size)
    return TensorSpec(shape, tuple(strides), dtype, CPU)


def halves(kept: TensorSpec, reader: str = "neg") -> tuple[fx.Node, fx.Node]:
    """A copy that a forward returns, and a backward's placeholder that something reads."""
    forward, backward = fx.Graph(), fx.Graph()
    source = forward.placeholder("x")
    copy = forward.call_function(torch.ops.aten.clone.default, (source,))
    forward.output((source, copy))
    placeholder = backward.placeholder("copy")
    result = placeholder
    if reader == "view":
        result = backward.call_function(prims.reshape, (placeholder, (kept.numel(),)))
    if reader in ("as_strided", "view"):
        result = backward.call_function(prims.as_strided, (result, (2,), (1,), 0))
    elif reader == "operator":
        result = backward.call_function(torch.ops.aten.neg.default, (placeholder,))
    elif reader == "neg":
        result = backward.call_function(prims.neg, (placeholder,))
    backward.output((result,))
    for node in (source, copy, placeholder):
        node.meta["val"] = kept
    return copy, placeholder


def test_odd_rows_get_a_margin() -> None:
    copy, placeholder = halves(spec(3, 5, 517))
    assert align_kept_rows([(copy, placeholder)], lambda _: WANTS)
    assert copy.target is prims.copy_strided
    assert copy.meta["val"] == placeholder.meta["val"] == TensorSpec((3, 5, 517), (2600, 520, 1), torch.bfloat16, CPU)


@pytest.mark.parametrize(
    "kept",
    [spec(5, 520), spec(517), spec(5, 517, dtype=torch.float32), spec(5, 67), spec(0, 517)],
    ids=["even", "a vector", "wide numbers", "too dear", "empty"],
)
def test_others_stay(kept: TensorSpec) -> None:
    assert not align_kept_rows([halves(kept)], lambda _: WANTS)


@pytest.mark.parametrize("reader", ["as_strided", "view", "operator", "output"])
def test_what_somebody_sees_stays(reader: str) -> None:
    assert not align_kept_rows([halves(spec(5, 517), reader)], lambda _: WANTS)


def test_a_device_that_does_not_mind() -> None:
    assert not align_kept_rows([halves(spec(5, 517))], lambda _: DeviceTraits())


@pytest.mark.parametrize(("columns", "copies"), [(517, 1), (520, 1)], ids=["with a margin", "without"])
def test_the_product_is_stored_once_for_each_who_has_it(columns: int, copies: int) -> None:
    """With a margin the caller gets a copy; without, the caller gets the product, and what is kept is the copy."""
    graph = fx.Graph()
    a, b = graph.placeholder("a"), graph.placeholder("b")
    product = graph.call_function(prims.mm, (a, b))
    copy = graph.call_function(prims.copy_strided, (product, (520, 1)))
    graph.output((product, copy))
    for node, value in ((a, spec(40, 24)), (b, spec(24, columns)), (product, spec(40, columns))):
        node.meta["val"] = value
    copy.meta["val"] = TensorSpec((40, columns), (520, 1), torch.bfloat16, CPU)
    lowered = lower_graph(fx.GraphModule({}, graph), InductorOptions(templates=False), traits_of=lambda _: WANTS)
    given, kept = lowered.outputs
    assert isinstance(given, ViewRef) and isinstance(kept, ViewRef)
    assert given.buffer != kept.buffer
    assert [str(s) for s in given.strides] == [str(columns), "1"] and [str(s) for s in kept.strides] == ["520", "1"]
    written = {name for operation in lowered.operations if isinstance(operation, Kernel) for name in operation.writes}
    assert len(written & {given.buffer, kept.buffer}) == copies
