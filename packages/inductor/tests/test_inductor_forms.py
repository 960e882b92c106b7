"""Kernels of one form: what is made of one is what would be made of each, and layers that are equal are work once."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from prim_graphs import build

from torchinductor import InductorOptions
from torchinductor.codegen.base import traits_of
from torchinductor.codegen.triton import plan, split, writer
from torchinductor.ir import Body, Constant, Kernel, by_form, kernels_by_form
from torchinductor.ir.verify import verify
from torchinductor.lowering.graph import lower_graph
from torchinductor.scheduling import finish, schedule
from torchinductor.source import on_device, planned_operations

CUDA = torch.device("cuda")
MADE_OF_KERNELS = (
    (schedule, "_one_kernel"),
    (schedule, "_with_columns"),
    (finish, "_finished"),
    (split, "split_reductions"),
)


def layers(count: int, width: int, rows: int = 4096, tell: float = 1.0) -> torch.fx.GraphModule:
    """Equal layers: softmax of rows, a product with a number, one of matrices, a sum of columns that is a result."""

    def program(P: Any, x: Any, weight: Any) -> tuple[Any, ...]:
        sums = []
        for _ in range(count):
            peak = P.expand(P.reshape(P.amax(x, [1], False), (rows, 1)), (rows, width))
            grown = P.exp(P.sub(x, peak))
            total = P.expand(P.reshape(P.sum(grown, [1], False), (rows, 1)), (rows, width))
            x = P.mm(P.mul(P.div(grown, total), tell), weight)
            sums.append(P.sum(x, [0], False))
        return (x, *sums)

    return build(program, torch.empty(rows, width), torch.empty(width, width))


WIDTHS = itertools.count(2000, 2)


def fresh_width() -> int:
    """A width that no other test of this process has had: what is made by form would be found."""
    return next(WIDTHS)


def kernels_of(graph: torch.fx.GraphModule) -> list[Kernel]:
    return [o for o in planned_operations(graph, CUDA) if isinstance(o, Kernel)]


def test_what_is_made_by_form_is_what_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each pass gives each kernel of several layers what it would give it alone, to the names of its workspaces."""
    compared = 0

    def checked(get: Callable[..., Sequence[Kernel]]) -> Callable[..., Sequence[Kernel]]:
        def both(*args: Any) -> Sequence[Kernel]:
            nonlocal compared
            found, alone = get(*args), get.__wrapped__(*args)  # type: ignore[attr-defined]
            assert list(found) == list(alone)
            for one, other in zip(found, alone, strict=True):
                verify(one)
                assert one.layout == other.layout and one.origins == other.origins
                own = replace(one)  # knows nothing that it was given
                assert own.form == one.form
            compared += 1
            return found

        return both

    for module, name in MADE_OF_KERNELS:
        monkeypatch.setattr(module, name, checked(getattr(module, name)))
    monkeypatch.setattr("torchinductor.codegen.triton.backend.split_reductions", split.split_reductions)
    for kernel in kernels_of(layers(4, fresh_width())):
        assert writer.write(kernel) == replace(writer._written.__wrapped__(kernel))  # type: ignore[attr-defined]
    assert compared > 20


def test_work_does_not_grow_with_equal_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planning, and the last step of fusion, are done as often for twelve layers as for six."""
    counts: list[tuple[int, int]] = []
    planned, merged = plan.planned, finish._merge_stages
    for count in (6, 12):
        calls = [0, 0]

        def counted(at: int, function: Callable[..., Any], calls: list[int] = calls) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                calls[at] += 1
                return function(*args, **kwargs)

            return call

        monkeypatch.setattr(split, "planned", counted(0, planned))
        monkeypatch.setattr(finish, "_merge_stages", counted(1, merged))
        planned_operations(layers(count, fresh_width()), CUDA)
        counts.append((calls[0], calls[1]))
    assert counts[0] == counts[1] and min(counts[0]) > 0


def test_numbers_that_are_equal_are_not_the_same() -> None:
    """-0.0 and 0.0, NaN and NaN: a kernel that has the one is not that of the other."""
    width = fresh_width()
    forms = [{k.form.content for k in kernels_of(layers(1, width, tell=tell))} for tell in (0.0, -0.0, 1e30, -1e30)]
    assert all(one != other for place, one in enumerate(forms) for other in forms[:place])
    nan = [{k.form.content for k in kernels_of(layers(1, width, tell=float("nan")))} for _ in range(2)]
    assert nan[0] == nan[1]


def test_what_kernels_have_in_common_is_part_of_their_forms() -> None:
    """A pair of which one reads what the other writes, and a pair of the same two forms of which it does not."""
    lowered = lower_graph(on_device(layers(3, fresh_width()), CUDA), InductorOptions(), lambda _: False)
    kernels = [o for o in lowered.operations if isinstance(o, Kernel)]
    alike: dict[object, list[Kernel]] = {}
    for kernel in kernels:
        alike.setdefault(kernel.form.content, []).append(kernel)
    feeding = [(a, b) for a in kernels for b in kernels if set(a.writes) & set(b.reads)]
    first, second = next((a, b) for a, b in feeding if len(alike[b.form.content]) > 1)
    apart = next(b for b in alike[second.form.content] if not set(first.writes) & set(b.reads))
    asked = []

    @kernels_by_form
    def pair(one: Kernel, other: Kernel) -> Sequence[Kernel]:
        asked.append((one, other))
        return ()

    pair(first, second)
    pair(first, apart)
    pair(first, second)
    assert asked == [(first, second), (first, apart)]


def test_layouts_and_devices_are_part_of_a_form() -> None:
    kernel = kernels_of(layers(1, fresh_width()))[0]
    asked: list[Kernel] = []
    get = by_form(lambda k: asked.append(k) or len(asked))  # type: ignore[func-returns-value]
    other = replace(kernel, device=torch.device("cuda", 1))
    bare = replace(kernel, layout=None)
    assert [get(k) for k in (kernel, other, bare, replace(kernel, name="another"))] == [1, 2, 3, 1]
    assert kernel.form.content != replace(kernel, scatters=True).form.content
    stage = kernel.stages[0]
    more = replace(stage, body=Body((*stage.body.ops, Constant(torch.float32, 2.0))))
    assert replace(kernel, stages=(more, *kernel.stages[1:])).form.content != kernel.form.content
    assert traits_of(CUDA) == traits_of(CUDA)
