"""Numbers that a program takes out of its tensors: one graph for all their values, forward and backward.

Where Python branches on a value, or looks at its text, the graph ends before the number is taken. What eager refuses of a size is
refused in eager's words.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils import _pytree as pytree

import torchcompile
import torchdynamo

pytestmark = pytest.mark.warm

Program = Callable[[torch.Tensor, torch.Tensor], Any]


def arithmetic(x: torch.Tensor, n: torch.Tensor) -> Any:
    return x * x.sum().item() + n[0].item() * 2 - 1


def of_two_kinds(x: torch.Tensor, n: torch.Tensor) -> Any:
    scale, count = float(x.detach().mean()), int(n.sum())
    return x * (scale * 2 + 1) / (count + 1.5), scale, count // 2


def whole_of_a_float(x: torch.Tensor, n: torch.Tensor) -> Any:
    return x + int(n.double().mean() * 1.7)


def made_by_size(x: torch.Tensor, n: torch.Tensor) -> Any:
    count = n.sum().item()
    return torch.zeros(count, dtype=x.dtype) + x.sum(), torch.arange(count) * 2, torch.ones(2, count).sum(1)


def first_rows(x: torch.Tensor, n: torch.Tensor) -> Any:
    return x[: n[0].item()].sum(0), x[n[1].item() :] * 2


def narrowed(x: torch.Tensor, n: torch.Tensor) -> Any:
    count = n[0].item()
    torch._check(count >= 0)
    torch._check(count <= x.shape[0])
    return x.narrow(0, 0, count) * 2


def split_by(x: torch.Tensor, n: torch.Tensor) -> Any:
    a, b = n.tolist()
    torch._check(a + b == x.shape[0])
    return [part.sum(0) for part in x.split([a, b])]


def repeated(x: torch.Tensor, n: torch.Tensor) -> Any:
    return torch.repeat_interleave(x[:2], n, dim=0).sin()


def spread(x: torch.Tensor, n: torch.Tensor) -> Any:
    return x.unsqueeze(0).expand(n[0].item(), -1, -1) * 2


def listed(x: torch.Tensor, n: torch.Tensor) -> Any:
    return x + sum(x.detach()[0].tolist()), n.tolist()


def asserted(x: torch.Tensor, n: torch.Tensor) -> Any:
    count = n[0].item()
    if count < 0:
        raise ValueError("negative")
    return torch.ones(count, dtype=x.dtype) * x.mean()


def taken_again(x: torch.Tensor, n: torch.Tensor) -> Any:
    for i in range(2):
        for j in range(2):
            x = x * (x.sum().item() * j + i) / (1 + n.sum().item())
    return x


def sized_by_a_float(x: torch.Tensor, n: torch.Tensor) -> Any:
    count = int(n.double().sum().item() * 0.7)
    return torch.zeros(count, dtype=x.dtype) + x.sum(), x.sum().expand(2, count) * 3


def sized_by_equal_floats(x: torch.Tensor, n: torch.Tensor) -> Any:
    found = []
    for i in range(2):
        for j in range(2):
            count = int(n.double().sum().item()) // 2 + i
            found.append(x.sum() + torch.ones(count, j + 1, dtype=x.dtype))
    return found


def sized_by_equal_integers(x: torch.Tensor, n: torch.Tensor) -> Any:
    whole, again = int(n.sum().item() * 0.7), int(n.sum().item() * 0.7)
    rows = [x[n.sum().item() % 3 : 3] * whole for _ in range(2)]
    return x.sum() + torch.ones(whole, dtype=x.dtype), x.sum() * torch.ones(again, dtype=x.dtype), rows


def computed_alike(x: torch.Tensor, n: torch.Tensor) -> Any:
    first, second = n.double().mean().item(), n.double().mean().item()
    return x * (second**0.5) + first / second, first - second, x.clamp(max=second * 2).sum() * torch.tensor(first * 2)


def bounded(x: torch.Tensor, n: torch.Tensor) -> Any:
    mean = n.double().mean().item()
    return x * max(mean, 1.5) + min(mean, 0.5), max(n[0].item(), 2), min(mean * 2, mean + 1)


def factors(x: torch.Tensor, n: torch.Tensor) -> Any:
    """0.25 to 1, which operators treat otherwise where they know it; a weight on either side of a half."""
    share, base = n[0].item() / 4, n[0].double().item() / 2
    y = x.add(x.sin(), alpha=share).sub(x.cos(), alpha=-base) + torch._foreach_add([x, x], [x, x], alpha=share)[0]
    y = y.addcmul(x, x, value=share).addcdiv(x, x.square() + 1, value=base)
    y = torch.addmm(y, x, x.T @ x, beta=share, alpha=base).add_(x, alpha=share)
    y = y.lerp(x * 2, share).lerp_(x.exp(), base - share)
    mean, variance = torch.zeros(3, dtype=x.dtype), torch.ones(3, dtype=x.dtype)
    normal = F.batch_norm(x, mean, variance, training=True, momentum=share)
    return y * (x.square() + 1) ** base + 2**base, normal, mean, variance


WHOLE = (
    factors, bounded, arithmetic, of_two_kinds, whole_of_a_float, made_by_size, first_rows, narrowed, split_by, repeated, spread, listed,
    asserted, taken_again, sized_by_a_float, sized_by_equal_floats, sized_by_equal_integers, computed_alike,
)  # fmt: skip


def results(program: Program, parts: tuple[int, int]) -> tuple[list[Any], torch.Tensor | None]:
    torch.manual_seed(sum(parts))
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    leaves = pytree.tree_leaves(program(x, torch.tensor(parts)))
    total: Any = sum(t.sum() for t in leaves if isinstance(t, torch.Tensor) and t.requires_grad)
    return leaves, torch.autograd.grad(total, x)[0] if isinstance(total, torch.Tensor) else None


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize(
    ("program", "dynamic"),
    # Of sizes that vary lists have an unknown length, and inductor does not know a cut to lie within the dim: graphs end.
    [(p, None) for p in WHOLE] + [(p, True) for p in WHOLE if p not in (split_by, listed, first_rows)],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_one_graph_serves_all_values(program: Program, backend: str, dynamic: bool | None) -> None:
    compiled = torchcompile.compile(program, backend=backend, fullgraph=True, dynamic=dynamic)
    for parts in ((1, 3), (2, 2), (3, 1), (4, 0)):
        found, wanted = results(compiled, parts), results(program, parts)
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)
        assert [type(leaf) for leaf in found[0]] == [type(leaf) for leaf in wanted[0]]
    report = torchcompile.report()
    assert report.captured == 1 and not report.events


def branches(x: torch.Tensor, n: torch.Tensor) -> Any:
    count, y = n[0].item(), x * 2
    return y + count if count > 2 else y - count


def looks_at_text(x: torch.Tensor, n: torch.Tensor) -> Any:
    return f"{n[0].item()} rows".partition(" ")[0], x * 2


def loops(x: torch.Tensor, n: torch.Tensor) -> Any:
    for _ in range(n[0].item()):
        x = x.sin()
    return x


def divides(x: torch.Tensor, n: torch.Tensor) -> Any:
    y = x.sin()
    return y * (7 % (n[0].item() + 1)) + 7 // (n[1].item() + 2)


@pytest.mark.expected_eager(...)
@pytest.mark.parametrize("program", [branches, looks_at_text, loops, divides], ids=lambda program: program.__name__)
def test_a_value_that_python_needs_ends_the_graph_before_it(program: Program) -> None:
    compiled = torchcompile.compile(program, backend="aot_eager")
    for parts in ((1, 3), (3, 1), (2, 2)):
        (found, gradient), (wanted, of_eager) = results(compiled, parts), results(program, parts)
        assert [a for a in found if isinstance(a, str)] == [a for a in wanted if isinstance(a, str)]
        torch.testing.assert_close(found[-1], wanted[-1])
        torch.testing.assert_close(gradient, of_eager)
    events = torchcompile.report().events
    told = [event for event in events if event.kind.id == "tensor_to_number"]
    assert {event.kind.id for event in events} <= {"tensor_to_number", "recompiled", "loop_of_each_length"}
    assert told and told[0].frames[-1].file == __file__
    with pytest.raises(torchdynamo.Unsupported, match="tensor_to_number"):
        torchcompile.compile(program, backend="eager", fullgraph=True)(torch.randn(4, 3), torch.tensor([1, 3]))


@pytest.mark.expected_eager(...)
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_what_is_no_size_is_refused_as_eager_refuses_it(backend: str) -> None:
    for program, parts, error in ((made_by_size, (1, -4), RuntimeError), (asserted, (-1, 3), ValueError)):
        compiled = torchcompile.compile(program, backend=backend)
        results(compiled, (1, 3))
        with pytest.raises(error) as wanted:
            results(program, parts)
        with pytest.raises(error) as found:
            results(compiled, parts)
        assert str(found.value) == str(wanted.value)
