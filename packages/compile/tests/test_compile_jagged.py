"""Nested tensors of the jagged layout in one graph: random programs over them, and what holds of them as objects.

Each is judged by eager in float64: values, offsets, gradients, and the result as an operand of what eager does next.
"""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nested._internal import nested_tensor as jagged

import torchcompile
from primtorch.ledger import Effect
from torchdynamo.api import owner_of
from torchdynamo.errors import Unsupported

Program = Callable[..., Any]
BACKENDS = ("eager", "aot_eager", "inductor")
LENGTHS = ((2, 3), (1, 4), (3, 1, 2), (0, 5), (2, 3))
NUMBERS: Any = jagged._tensor_symint_registry


def offsets_of(lengths: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


def rows(lengths: tuple[int, ...], features: int = 4) -> Any:
    values = torch.randn(sum(lengths), features, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return torch.nested.nested_tensor_from_jagged(values, offsets_of(lengths)).detach()


def events_of(program: Any, *effects: Effect) -> list[str]:
    events = owner_of(program).stats.ledger.events
    return [event.kind.id for event in events if event.effect in (effects or (Effect.BREAK, Effect.FALLBACK))]


def same(found: Any, wanted: Any) -> None:
    """Both are nested tensors of equal rows, or equal tensors."""
    assert type(found) is type(wanted) and found.requires_grad == wanted.requires_grad
    if wanted.is_nested:
        assert found._ragged_idx == wanted._ragged_idx and found.dtype == wanted.dtype
        torch.testing.assert_close(found.offsets(), wanted.offsets(), rtol=0, atol=0)
        found, wanted = found.values(), wanted.values()
        assert found.stride() == wanted.stride()
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)


# -- random programs -----------------------------------------------------------------------------

# Steps from a nested tensor to one of the same rows, `d` its last size; each has a derivative in torch.
STEPS: dict[str, Callable[[Any, random.Random], Any]] = {
    "sin": lambda t, _: t.sin(),
    "gelu": lambda t, _: F.gelu(t),
    "scaled": lambda t, _: 2 * t + 1,
    "reversed": lambda t, _: 1 / (t * t + 1) - t,
    "softmax": lambda t, _: t.softmax(-1),
    "layer_norm": lambda t, _: F.layer_norm(t, (t.size(-1),)),
    "masked": lambda t, _: t.masked_fill(t > 0.5, 0.25),
    "where": lambda t, _: torch.where(t > 0, t, torch.zeros_like(t)),
    "with itself": lambda t, _: t * t.cos() + t,
    "doubled": lambda t, _: torch.cat([t, t.sin()], -1),
    "halves": lambda t, _: torch.cat(list(t.chunk(2, -1)), -1) if t.size(-1) % 2 == 0 else t,
    "there and back": lambda t, _: t.unsqueeze(-1).squeeze(-1),
    "split": lambda t, _: t.unflatten(-1, [2, -1]).flatten(-2) if t.size(-1) % 2 == 0 else t,
    "contiguous": lambda t, _: t.contiguous().clone(),
    "detached": lambda t, _: t + t.detach(),
    "cast": lambda t, _: t.float().double(),
    "remade": lambda t, _: torch.nested.nested_tensor_from_jagged(t.values() * 2, t.offsets()),
    "by the number of rows": lambda t, _: t * t.size(0),
    "transposed": lambda t, _: t.transpose(1, 2).cos().transpose(1, 2) if t.dim() == 3 else t,
}


def drawn_program(seed: int) -> tuple[str, Program]:
    """Steps, some with weights, whose result is a nested tensor, its values, padded, or several of these."""
    draw = random.Random(seed)
    names = [draw.choice([*STEPS, "linear", "matmul", "bias"]) for _ in range(draw.randint(2, 6))]
    end = draw.choice(["itself", "values", "padded", "both", "mean"])

    def program(t: Any, weight: torch.Tensor) -> Any:
        first = t
        for name in names:
            d = t.size(-1)
            if name == "linear":
                t = F.linear(t, weight[:, :1].expand(3, d), weight[:3, 0])
            elif name == "matmul":
                t = t @ weight[:1, :3].expand(d, 3)
            elif name == "bias":
                t = t + weight[0, :1]
            else:
                t = STEPS[name](t, draw)
        if end == "itself":
            return t
        if end == "values":
            return t.values() * 2
        if end == "padded":
            return t.to_padded_tensor(0.5)
        if end == "mean":
            return t.mean(-1, keepdim=True) * t
        return t, first.values().sum() * t, t.shape == first.shape

    return f"{' -> '.join(names)}: {end}", program


def observed(program: Program, seed: int, lengths: tuple[int, ...], mode: Callable[[], Any]) -> list[Any]:
    """Results, and gradients by the values and a weight after three backwards."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(sum(lengths), 4, dtype=torch.float64, generator=generator, requires_grad=True)
    weight = torch.randn(3, 5, dtype=torch.float64, generator=generator, requires_grad=True)
    offsets = offsets_of(lengths)
    seen: list[Any] = []
    for _ in range(3):
        with mode():
            given = torch.nested.nested_tensor_from_jagged(values, offsets)
            found = program(given, weight)
        for leaf in found if isinstance(found, tuple) else (found,):
            if not isinstance(leaf, torch.Tensor):
                seen.append(leaf)
                continue
            seen.append(leaf)
            plain = leaf.values() if leaf.is_nested else leaf
            if leaf.is_nested and leaf._ragged_idx == 1 and leaf.size(-1) == 4:
                seen.append(leaf + given)  # which eager takes for the same rows
            if plain.requires_grad:
                (plain * plain).sum().backward(retain_graph=True)
    return [*seen, values.grad, weight.grad]


@pytest.mark.expected_eager("recompiled")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("seed", range(12))
def test_a_random_program(seed: int, backend: str) -> None:
    text, program = drawn_program(seed)
    compiled = torchcompile.compile(program, backend=backend)
    for lengths in LENGTHS:
        for mode in (nullcontext, torch.no_grad):
            wanted = observed(program, seed, lengths, mode)
            found = observed(compiled, seed, lengths, mode)
            assert len(found) == len(wanted), f"seed {seed}: {text}"
            for one, other in zip(found, wanted, strict=True):
                try:
                    same(one, other) if isinstance(other, torch.Tensor) else None
                    assert isinstance(other, torch.Tensor) or one == other
                except AssertionError as error:
                    raise AssertionError(f"seed {seed}, lengths {lengths}: {text}") from error
    assert not events_of(compiled), f"seed {seed}: {text}"


# -- nested tensors as objects -------------------------------------------------------------------


def doubled(t: Any) -> Any:
    return (t * 2).sin()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_leaf_gets_a_nested_gradient_of_its_offsets(backend: str) -> None:
    compiled = torchcompile.compile(lambda t: doubled(t) + t, backend=backend)
    for lengths in LENGTHS:
        ours, eagers = (rows(lengths).requires_grad_() for _ in range(2))
        seen: list[Any] = []
        ours.register_hook(seen.append)
        (compiled(ours).values() ** 2).sum().backward()
        ((doubled(eagers) + eagers).values() ** 2).sum().backward()
        same(ours.grad, eagers.grad)
        assert ours.grad.offsets() is ours.offsets() and len(seen) == 1
    assert events_of(compiled, Effect.RECOMPILE, Effect.BREAK) in (["recompiled"], ["recompiled"] * 2)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_second_derivative(backend: str) -> None:
    found = []
    for program in (doubled, torchcompile.compile(doubled, backend=backend)):
        leaf = rows((2, 3)).requires_grad_()
        (first,) = torch.autograd.grad((program(leaf).values() ** 2).sum(), leaf, create_graph=True)
        found += torch.autograd.grad((first.values() ** 2).sum(), leaf)
    same(*found)


def test_a_write_to_a_result_is_known_to_autograd() -> None:
    """What the graph has kept of a result that is written to later is refused, as eagerly; what it has not is right."""
    compiled = torchcompile.compile(lambda t: t.exp(), backend="aot_eager")
    found = compiled(rows((2, 3)).requires_grad_())
    found.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        found.values().sum().backward()

    offsets = offsets_of((2, 3))
    made = lambda values: torch.nested.nested_tensor_from_jagged(values, offsets)
    gradients = []
    for program in (made, torchcompile.compile(made, backend="aot_eager")):
        leaf = torch.ones(5, 4, dtype=torch.float64, requires_grad=True)
        values = leaf * 1
        program(values).mul_(3)
        (values * values).sum().backward()
        gradients.append(leaf.grad)
    torch.testing.assert_close(*gradients)


def test_two_are_of_the_same_rows_or_not() -> None:
    """Whether two have one ragged length is guarded: operators take them together only then."""

    def added(a: Any, b: Any) -> Any:
        return a + b if a.shape == b.shape else a * 3

    compiled = torchcompile.compile(added, backend="aot_eager")
    a, other = rows((2, 3)), rows((2, 3))
    for b in (a * 2, other, a, other.sin(), a.double(), a):
        same(compiled(a, b), added(a, b))
    assert not events_of(compiled)

    def remade(t: Any, values: torch.Tensor, offsets: torch.Tensor) -> bool:
        return bool(torch.nested.nested_tensor_from_jagged(values, offsets).shape == t.shape)

    compiled = torchcompile.compile(remade, backend="aot_eager")
    for offsets in (a.offsets(), a.offsets().clone(), a.offsets(), offsets_of((3, 2))):
        assert compiled(a, torch.ones(5, 4), offsets) is (offsets is a.offsets())


def test_other_forms_are_noticed() -> None:
    def described(t: Any) -> Any:
        return doubled(t), t.is_contiguous(), t.lengths() is None, t.requires_grad

    plain = rows((2, 3), 3)
    with_holes = torch.nested.nested_tensor_from_jagged(plain.values(), plain.offsets(), torch.tensor([1, 2]))
    forms = [plain, with_holes, plain.transpose(1, 2), plain.float(), rows((2, 3), 3).requires_grad_(), plain]
    compiled = torchcompile.compile(described, backend="aot_eager")
    for form in [*forms, *forms]:
        found, wanted = compiled(form), described(form)
        same(found[0], wanted[0])
        assert found[1:] == wanted[1:] and found[0].lengths() is form.lengths()
    assert not events_of(compiled)


@pytest.mark.expected_eager("program_raised")
def test_torchs_method_in_another_ones_place_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = torchcompile.compile(doubled, backend="eager")
    given = rows((2, 3))
    compiled(given)
    method = classmethod(lambda cls, func, types, args=(), kwargs=None: "another")
    monkeypatch.setattr(jagged.NestedTensor, "__torch_function__", method)
    with pytest.raises(AttributeError, match="sin"):
        doubled(given)
    with pytest.raises(AttributeError, match="sin"):
        compiled(given)
    monkeypatch.undo()
    same(compiled(given), doubled(given))


def counted(program: Program, lengths: tuple[int, ...]) -> tuple[int, bool]:
    """How many numbers torch has given for a call on values and new offsets, and whether these have one."""
    before, offsets = jagged._tensor_id_counter, offsets_of(lengths)
    program(torch.ones(sum(lengths), 4), offsets)
    return jagged._tensor_id_counter - before, NUMBERS.get(offsets) is not None


@pytest.mark.parametrize("backend", BACKENDS)
def test_torch_numbers_ragged_lengths_as_eagerly(backend: str) -> None:
    nested = torch.nested.nested_tensor_from_jagged
    programs: list[Program] = [
        lambda v, o: nested(v, o).sin().values(),
        lambda v, o: nested(v, o) * 2,
        lambda v, o: (nested(v, o * 1) * 2).values(),
        lambda v, o: (nested(v, o + 0).sin(), nested(v, o)),
    ]
    jagged._nt_view_dummy()
    for program in programs:
        compiled = torchcompile.compile(program, backend=backend)
        for lengths in LENGTHS:
            assert counted(compiled, lengths) == counted(program, lengths)


def test_nothing_of_a_nested_tensor_is_kept() -> None:
    compiled = torchcompile.compile(doubled, backend="aot_eager")
    compiled(rows((2, 3)))
    gc.collect()
    kept = len(NUMBERS)
    given = rows((2, 3)).requires_grad_()
    parts = [weakref.ref(part) for part in (given, given._values, given._offsets)]
    (compiled(given).values() ** 2).sum().backward()
    del given
    gc.collect()
    assert [part() for part in parts] == [None] * 3 and len(NUMBERS) == kept


@pytest.mark.expected_eager("print")
@pytest.mark.parametrize("backend", BACKENDS)
def test_across_breaks(backend: str) -> None:
    def broken(t: Any) -> Any:
        half = t * 2
        print(end="")
        whole = half.sin() + t
        print(end="")
        return whole, whole.values().sum()

    compiled = torchcompile.compile(broken, backend=backend)
    for lengths in LENGTHS:
        ours, eagers = (rows(lengths).requires_grad_() for _ in range(2))
        for program, leaf in ((compiled, ours), (broken, eagers)):
            whole, total = program(leaf)
            (total + (whole.values() ** 2).sum()).backward()
        same(ours.grad, eagers.grad)


def each_mode() -> Iterator[Callable[[], AbstractContextManager[Any]]]:
    yield from (nullcontext, torch.no_grad, torch.inference_mode)
    yield lambda: torch.autocast("cpu", dtype=torch.bfloat16)


@pytest.mark.parametrize("mode", each_mode())
def test_under_modes(mode: Callable[[], AbstractContextManager[Any]]) -> None:
    weight = torch.ones(4, 3, requires_grad=True)
    program = lambda t: (t @ weight).relu()
    compiled = torchcompile.compile(program, backend="aot_eager")
    for lengths in LENGTHS:
        given = rows(lengths).float()
        with mode():
            found, wanted = compiled(given), program(given)
            assert found.dtype == wanted.dtype and found.requires_grad == wanted.requires_grad
            assert found.is_inference() == wanted.is_inference()
            torch.testing.assert_close(found.values(), wanted.values())


def test_draws_are_eagers() -> None:
    def program(t: Any) -> Any:
        F.dropout(t, 0.5)
        return F.dropout(t, 0.5), torch.rand(3)

    compiled = torchcompile.compile(program, options={"eager_random": True})
    for lengths in LENGTHS:
        torch.manual_seed(1)
        found = compiled(rows(lengths))
        torch.manual_seed(1)
        for one, other in zip(found, program(rows(lengths)), strict=True):
            same(one, other)


# -- what leaves the graph -----------------------------------------------------------------------


WEIGHT = torch.ones(4, dtype=torch.float64, requires_grad=True)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, nested: Any) -> Any:
        return nested * 2

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return gradient * 2


def heads_of(t: Any, count: int = 2) -> Any:
    return torch.cat([t, t.sin()], -1).unflatten(-1, [count, 8 // count]).transpose(1, 2)


def attended(t: Any, **options: Any) -> Any:
    query = heads_of(t)
    return F.scaled_dot_product_attention(query, query * 2, query.cos(), **options).transpose(1, 2).flatten(-2)


PARAMETER = torch.nn.Parameter(rows((2, 3)))
LEAVING: dict[str, tuple[Program, str]] = {
    "attention with dropout": (lambda t: attended(t, dropout_p=1.0), "data_dependent_shape"),
    "causal attention": (lambda t: attended(t, is_causal=True), "special_tensor"),
    "attention with a mask": (lambda t: attended(t, attn_mask=torch.ones(1, dtype=torch.bool)), "special_tensor"),
    "a parameter": (lambda t: t.values() + (PARAMETER * 2).values(), "special_tensor"),
    "a row": (lambda t: t[0] * 2, "special_tensor"),
    "written to": (lambda t: (t * 1).add_(1), "special_tensor"),
    "values written to": (lambda t: (t.values().mul_(2), t * 1)[1], "tensor_subclass"),
    "softmax over the lengths": (lambda t: t.softmax(1), "special_tensor"),
    "what torch has not": (lambda t: t * t.cumsum(-1), "special_tensor"),
    "text of its sizes": (lambda t: (f"{t.shape}", t * 2)[1], "special_tensor"),
    "its history": (lambda t: (t * 2) if t.grad_fn is None else t, "unsupported_read"),
    "an autograd function": (lambda t: Doubled.apply(t) + 1, "autograd_function"),
    "a derivative over the lengths": (lambda t: (t * WEIGHT).amax(1), "special_tensor"),
}


@pytest.mark.expected_eager(...)
@pytest.mark.parametrize("name", LEAVING)
def test_what_leaves_the_graph_is_told_and_refused(name: str) -> None:
    program, reason = LEAVING[name]
    outcome: list[Any] = []
    compiled = torchcompile.compile(program, backend="aot_eager")
    for run in (program, compiled):
        try:
            outcome.append(run(rows((2, 3))))
        except (NotImplementedError, RuntimeError, ValueError) as error:
            outcome.append(type(error))
    if isinstance(outcome[0], torch.Tensor):
        same(outcome[1], outcome[0])
    else:
        assert outcome[0] == outcome[1]
    assert reason in events_of(compiled)
    with pytest.raises(Unsupported, match=reason):
        torchcompile.compile(program, backend="aot_eager", fullgraph=True)(rows((2, 3)))


# -- attention -------------------------------------------------------------------------------------

OTHER = torch.nested.nested_tensor_from_jagged(
    torch.linspace(-1, 1, 36, dtype=torch.float64).view(9, 4), torch.tensor([0, 4, 9])
)


def to_other_rows(t: Any) -> Any:
    key = heads_of(OTHER * 1)
    return F.scaled_dot_product_attention(heads_of(t), key, key.sin(), scale=0.3).transpose(1, 2).flatten(-2)


def wide_values(t: Any) -> Any:
    query, value = heads_of(t), torch.cat([t, t, t], -1).unflatten(-1, [2, 6]).transpose(1, 2)
    return F.scaled_dot_product_attention(query, query, value).transpose(1, 2).flatten(-2)


def twice(t: Any) -> Any:
    return attended(attended(t) @ torch.linspace(-1, 1, 32, dtype=torch.float64).view(8, 4))


ATTENDING: dict[str, Program] = {
    "to itself": attended,
    "scaled": lambda t: attended(t, scale=0.1),
    "to other rows": to_other_rows,
    "values of another width": wide_values,
    "a head": lambda t: F.scaled_dot_product_attention(*[heads_of(t, 1)] * 3).transpose(1, 2).flatten(-2),
    "twice": twice,
    "allowed to use no other": lambda t: allowed(t),
}


def allowed(t: Any) -> Any:
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        return attended(t)


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("name", ATTENDING)
def test_attention_is_one_graph_for_all_lengths(name: str, backend: str) -> None:
    program = ATTENDING[name]
    compiled = torchcompile.compile(program, backend=backend, fullgraph=True)
    for lengths in ((2, 3), (1, 4), (5, 2), (1, 1), (3, 0), (7, 7)):
        for kept in ({}, {"min_seqlen": min(lengths), "max_seqlen": max(lengths)}):
            found = []
            for run in (program, compiled):
                generator = torch.Generator().manual_seed(3)
                values = torch.randn(sum(lengths), 4, dtype=torch.float64, generator=generator, requires_grad=True)
                result = run(torch.nested.nested_tensor_from_jagged(values, offsets_of(lengths), **kept))
                (gradient,) = torch.autograd.grad(result.values().square().sum(), values)
                found.append((result.values(), result.offsets(), gradient))
                assert result.dim() == 3 and result.values().is_contiguous()
            torch.testing.assert_close(found[1], found[0], rtol=1e-9, atol=1e-11)


# -- row by row ----------------------------------------------------------------------------------

BY_ROWS: dict[str, Program] = {
    "unbind": lambda t: [(row * 2).sum(0) for row in (t + 1).unbind()],
    "iterated": lambda t: [row.softmax(0) for row in t],
    "along the features": lambda t: [row.cos() for row in t.transpose(1, 2).unbind()],
    "written": lambda t: [row.add_(place) for place, row in enumerate((t * 1).unbind())],
    "put together": lambda t: torch.cat([row.sum(0, keepdim=True) for row in t.unbind()]),
}


def each_row(program: Program, lengths: tuple[int, ...], requires_grad: bool) -> list[Any]:
    """Results and gradients; or what is raised."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(sum(lengths), 4, dtype=torch.float64, generator=generator, requires_grad=requires_grad)
    try:
        found = program(torch.nested.nested_tensor_from_jagged(values, offsets_of(lengths)))
    except RuntimeError as error:
        return [type(error)]
    leaves = list(found) if isinstance(found, list) else [found]
    if requires_grad:
        total: Any = sum((leaf.sin() * leaf).sum() for leaf in leaves)
        leaves += torch.autograd.grad(total, values)
    return leaves


@pytest.mark.expected_eager(...)
@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", BY_ROWS)
def test_row_by_row(name: str, backend: str, requires_grad: bool) -> None:
    program = BY_ROWS[name]
    compiled = torchcompile.compile(program, backend=backend)
    for lengths in LENGTHS:
        wanted, found = (each_row(run, lengths, requires_grad) for run in (program, compiled))
        if isinstance(wanted[0], type):
            assert found == wanted
        else:
            torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)
    assert not events_of(compiled, Effect.BREAK) or name == "written"
