"""PyTorch's language, a program for each part of it: what capture takes whole, and what breaks it.

A program is a function of float64 tensors whose gradients are asked for where it says so. `tools/reach.py` runs them
here and under torch.compile, and writes docs/reach.md.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import enum
import functools
import itertools
import math
import warnings
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch._higher_order_ops.associative_scan import associative_scan
from torch._higher_order_ops.map import map as hop_map
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.utils import parametrizations
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

Program = Callable[..., Any]


def sizes(*shape: int) -> tuple[torch.Tensor, ...]:
    return (torch.randn(*shape, dtype=torch.float64),)


@dataclass(frozen=True)
class Part:
    """A part of the language.

    Attributes:
        make: gives the program, anew for each compiler: it may hold state.
        calls: the arguments of each call, drawn anew for each compiler from one seed.
        gradient: whether the sum of the floating results is differentiated by the arguments.
        breaks: what the ledger may tell beside recompilations, by its kinds: why it is not one graph.
        judge: the same in plain operators, for what torch itself computes wrongly in a version that is supported.
    """

    group: str
    name: str
    make: Callable[[], Program]
    calls: Callable[[], list[tuple[Any, ...]]]
    gradient: bool = True
    breaks: tuple[str, ...] = ()
    judge: Program | None = None

    def run(self, compiler: Callable[[Program], Program]) -> list[tuple[list[Any], list[Any]]]:
        """The leaves of each call's results, and its gradients by the tensors among its arguments."""
        torch.manual_seed(1)
        program = compiler(self.make())
        torch.manual_seed(2)
        return [self._call(program, args) for args in self.calls()]

    def _call(self, program: Program, args: tuple[Any, ...]) -> tuple[list[Any], list[Any]]:
        by = [a for a in args if isinstance(a, torch.Tensor)] if self.gradient else []
        for leaf in by:
            leaf.requires_grad_()
        leaves = [
            leaf
            for result in pytree.tree_leaves(program(*args))
            for leaf in (pytree.tree_leaves(list(result)) if isinstance(result, Iterator) else [result])
        ]
        floats = [t for t in leaves if isinstance(t, torch.Tensor) and t.requires_grad]
        if not by or not floats:
            return leaves, []
        total: Any = sum(t.sum() for t in floats)
        return leaves, list(torch.autograd.grad(total, by, allow_unused=True))


PARTS: dict[str, Part] = {}


def default_calls() -> list[tuple[Any, ...]]:
    return [sizes(4, 3), sizes(4, 3), sizes(6, 3)]


def maker(
    group: str,
    name: str,
    *breaks: str,
    calls: Callable[[], list[tuple[Any, ...]]] = default_calls,
    gradient: bool = True,
    judge: Program | None = None,
) -> Callable[[Callable[[], Program]], Callable[[], Program]]:
    """Adds what makes a program: one that holds state."""

    def add(make: Callable[[], Program]) -> Callable[[], Program]:
        PARTS[name] = Part(group, name, make, calls, gradient, breaks, judge)
        return make

    return add


def part(group: str, name: str, *breaks: str, **more: Any) -> Callable[[Program], Program]:
    """Adds a program without state."""

    def add(program: Program) -> Program:
        maker(group, name, *breaks, **more)(lambda: program)
        return program

    return add


# -- higher-order operators ----------------------------------------------------------------------

HIGHER = "Higher-order operators"


@part(HIGHER, "torch.cond")
def cond(x: torch.Tensor) -> torch.Tensor:
    return torch.cond(x.sum() > 0, lambda t: t.sin(), lambda t: t.cos(), (x,))


@part(HIGHER, "while_loop", gradient=False)
def loop(x: torch.Tensor) -> Any:
    count = torch.zeros((), dtype=torch.int64)
    return while_loop(lambda i, t: i < 3, lambda i, t: (i + 1, t * 1.5), (count, x))


def scanned_row_by_row(x: torch.Tensor) -> Any:
    carry, products = torch.zeros_like(x[0]), []
    for row in x:
        products.append(carry * row)
        carry = carry + row
    return carry, torch.stack(products)


@part(HIGHER, "scan", judge=scanned_row_by_row)  # its gradient in eager is wrong on torch 2.11
def scanned(x: torch.Tensor) -> Any:
    return scan(lambda carry, row: (carry + row, carry * row), torch.zeros_like(x[0]), x)


@part(HIGHER, "associative_scan", gradient=False)
def associative(x: torch.Tensor) -> Any:
    return associative_scan(torch.add, x, 0, combine_mode="generic")


@part(HIGHER, "map")
def mapped(x: torch.Tensor) -> Any:
    return hop_map(lambda row: row.sin() * 2, x)


@part(HIGHER, "checkpoint")
def checkpointed(x: torch.Tensor) -> torch.Tensor:
    return checkpoint(lambda t: t.sin().exp(), x, use_reentrant=False)  # type: ignore[no-any-return]


def kept(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op is torch.ops.aten.mm.default else CheckpointPolicy.PREFER_RECOMPUTE


@part(HIGHER, "checkpoint with a policy")
def checkpointed_by_policy(x: torch.Tensor) -> torch.Tensor:
    chosen = functools.partial(create_selective_checkpoint_contexts, kept)
    return checkpoint(lambda t: (t.sin() @ t.mT).exp(), x, use_reentrant=False, context_fn=chosen)  # type: ignore[no-any-return]


# -- torch.func ----------------------------------------------------------------------------------

FUNC = "torch.func"


def scalar(x: torch.Tensor) -> torch.Tensor:
    return (x.sin() * x).sum()


@part(FUNC, "grad")
def func_grad(x: torch.Tensor) -> Any:
    return torch.func.grad(scalar)(x)


@part(FUNC, "value_and_grad")
def func_value_and_grad(x: torch.Tensor) -> Any:
    return torch.func.grad_and_value(scalar)(x)


@part(FUNC, "vmap")
def func_vmap(x: torch.Tensor) -> Any:
    return torch.vmap(lambda row: (row * row).sum())(x)


@part(FUNC, "vmap of grad")
def func_per_sample(x: torch.Tensor) -> Any:
    return torch.vmap(torch.func.grad(scalar))(x)


@part(FUNC, "jvp")
def func_jvp(x: torch.Tensor) -> Any:
    return torch.func.jvp(torch.sin, (x,), (torch.ones_like(x),))


@part(FUNC, "vjp")
def func_vjp(x: torch.Tensor) -> Any:
    value, pull = torch.func.vjp(torch.sin, x)
    return value, pull(torch.ones_like(value))[0]


@part(FUNC, "jacrev")
def func_jacrev(x: torch.Tensor) -> Any:
    return torch.func.jacrev(lambda t: t.sin().sum(0))(x)


@part(FUNC, "jacfwd")
def func_jacfwd(x: torch.Tensor) -> Any:
    return torch.func.jacfwd(lambda t: t.sin().sum(0))(x)


@part(FUNC, "hessian")
def func_hessian(x: torch.Tensor) -> Any:
    return torch.func.hessian(scalar)(x)


@maker(FUNC, "functional_call")
def func_functional_call() -> Program:
    net = nn.Linear(3, 3).double()
    weights = {name: p.detach() for name, p in net.named_parameters()}
    return lambda x: torch.func.functional_call(net, weights, (x,))


@part(FUNC, "autograd.grad within")
def inner_grad(x: torch.Tensor) -> Any:
    y = x.detach().requires_grad_()
    (g,) = torch.autograd.grad(y.sin().sum(), y)
    return g * x


@part(FUNC, "autograd.grad within, differentiated again")
def penalised(x: torch.Tensor) -> Any:
    y = x.detach().requires_grad_()
    (g,) = torch.autograd.grad((y * x).sin().sum(), y, create_graph=True)
    return (g.norm() - 1) ** 2


@part(FUNC, "backward(create_graph=True)")
def backward_with_history(x: torch.Tensor) -> Any:
    (x.sin() * x).sum().backward(create_graph=True)
    assert x.grad is not None
    found = x.grad.square()
    x.grad = None
    return found


@part(FUNC, "forward-mode dual numbers")
def duals(x: torch.Tensor) -> Any:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(forward_ad.make_dual(x, torch.ones_like(x)).sin()).tangent


# -- whole training steps ------------------------------------------------------------------------

STEPS = "Training steps"


def _step(make: Callable[[Any], torch.optim.Optimizer], clip: bool) -> Program:
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    optimizer = make(net.parameters())

    def step(x: torch.Tensor) -> Any:
        optimizer.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        optimizer.step()
        return loss.detach(), [p.detach().clone() for p in net.parameters()]

    return step


@maker(STEPS, "backward() and SGD", gradient=False)
def sgd_step() -> Program:
    return _step(lambda p: torch.optim.SGD(p, 0.1), clip=False)


@maker(STEPS, "backward(), clipping and AdamW", gradient=False)
def adam_step() -> Program:
    return _step(lambda p: torch.optim.AdamW(p, 0.1), clip=True)


# -- NumPy ---------------------------------------------------------------------------------------

NUMPY = "NumPy"


@part(NUMPY, "from and to arrays", gradient=False)
def through_numpy(x: torch.Tensor) -> Any:
    return torch.from_numpy(np.sin(x.numpy()) + 1) * 2


@part(
    NUMPY,
    "a function of arrays",
    calls=lambda: [(np.linspace(0.0, 1.0, 6),), (np.linspace(0.0, 2.0, 6),)],
    gradient=False,
)
def of_arrays(a: Any) -> Any:
    return (np.exp(a) * a[::-1]).cumsum()


# -- subclasses ----------------------------------------------------------------------------------

SUBCLASSES = "Tensor subclasses"


class Tagged(torch.Tensor):
    """With __torch_function__ as every subclass has it."""


class Pair(torch.Tensor):
    """Two tensors as one, by __torch_dispatch__."""

    @staticmethod
    def __new__(cls, a: torch.Tensor, b: torch.Tensor) -> Pair:
        return torch.Tensor._make_wrapper_subclass(cls, a.shape, dtype=a.dtype)  # type: ignore[attr-defined, no-any-return]

    def __init__(self, a: torch.Tensor, b: torch.Tensor) -> None:
        self.a, self.b = a, b

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["a", "b"], None

    @staticmethod
    def __tensor_unflatten__(inner: Any, meta: Any, size: Any, stride: Any) -> Pair:
        return Pair(inner["a"], inner["b"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        each = [
            func(*(getattr(t, name) if isinstance(t, Pair) else t for t in args), **(kwargs or {})) for name in "ab"
        ]
        return cls(*each) if isinstance(each[0], torch.Tensor) else each[0]


@part(SUBCLASSES, "__torch_function__ by default", gradient=False)
def tagged(x: torch.Tensor) -> Any:
    return x.as_subclass(Tagged).sin() + 1


class Logged(torch.Tensor):
    """With a __torch_function__ of its own, which notes what it was asked."""

    asked: list[str] = []

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.asked.append(func.__name__)
        with torch._C.DisableTorchFunctionSubclass():
            out = func(*args, **(kwargs or {}))
        return out.as_subclass(cls) if isinstance(out, torch.Tensor) else out


@part(SUBCLASSES, "__torch_function__ of its own", gradient=False)
def logged(x: torch.Tensor) -> Any:
    Logged.asked.clear()
    y = x.as_subclass(Logged).sin() + 1
    return y, len(Logged.asked)


@part(
    SUBCLASSES,
    "two tensors in one, as an input",
    gradient=False,
    calls=lambda: [(Pair(*sizes(3), *sizes(3)),)] * 2,
)
def of_pairs(p: Any) -> Any:
    out = (p.sin() + p) * 2
    return out.a, out.b


@part(SUBCLASSES, "two tensors in one, made and taken apart")
def makes_pairs(x: torch.Tensor) -> Any:
    pair = Pair(x.detach(), x.detach() + 1) * 2
    return pair.a * x, pair.b


class InLevels(torch.Tensor):
    """A weight of int8, as operators see it one of float64."""

    @staticmethod
    def __new__(cls, levels: torch.Tensor) -> InLevels:
        return torch.Tensor._make_wrapper_subclass(cls, levels.shape, dtype=torch.float64)  # type: ignore[attr-defined, no-any-return]

    def __init__(self, levels: torch.Tensor) -> None:
        self.levels = levels

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["levels"], None

    @staticmethod
    def __tensor_unflatten__(inner: Any, meta: Any, size: Any, stride: Any) -> InLevels:
        return InLevels(inner["levels"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].levels)
        return func(*(t.levels.double() / 16 if isinstance(t, cls) else t for t in args), **(kwargs or {}))

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


@maker(SUBCLASSES, "a quantised weight in a module")
def quantised() -> Program:
    net = nn.Linear(3, 4).double()
    net.weight = nn.Parameter(InLevels(torch.arange(-6, 6, dtype=torch.int8).reshape(4, 3)), requires_grad=False)
    return net


@part(SUBCLASSES, "nested jagged", "special_tensor", "tensor_subclass", "unsplit_frame", gradient=False)
def jagged(x: torch.Tensor) -> Any:
    return torch.nested.nested_tensor([x, x[:2]], layout=torch.jagged).sin().values()


@maker(SUBCLASSES, "parametrizations")
def parametrized() -> Program:
    torch.manual_seed(3)
    return parametrizations.weight_norm(nn.Linear(3, 3).double())  # type: ignore[no-any-return]


# -- attention -----------------------------------------------------------------------------------

ATTENTION = "Attention"


def heads() -> list[tuple[Any, ...]]:
    return [tuple(torch.randn(2, 4, 6, 8, dtype=torch.float64) for _ in range(3)) for _ in range(2)]


@part(ATTENTION, "scaled_dot_product_attention, causal", calls=heads)
def causal(q: Any, k: Any, v: Any) -> Any:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


@part(ATTENTION, "with a mask and enable_gqa", calls=heads)
def grouped(q: Any, k: Any, v: Any) -> Any:
    mask = torch.ones(6, 6, dtype=torch.bool).tril()
    return F.scaled_dot_product_attention(q, k[:, :2], v[:, :2], mask, enable_gqa=True)


@part(ATTENTION, "sdpa_kernel", calls=heads)
def chosen_kernel(q: Any, k: Any, v: Any) -> Any:
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, k, v)


def by_distance(q: Any, k: Any, v: Any) -> Any:
    """What `flexible` computes: eager would run that by a compiler, and on the CPU without gradients."""
    queries, keys = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])
    scores = q @ k.transpose(-2, -1) / q.shape[3] ** 0.5 + (queries - keys)
    return scores.masked_fill(queries < keys, -torch.inf).softmax(-1) @ v


@part(ATTENTION, "flex_attention", calls=heads, judge=by_distance)
def flexible(q: Any, k: Any, v: Any) -> Any:
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, q.shape[2], k.shape[2], "cpu")
    return flex_attention(q, k, v, lambda score, b, h, i, j: score + (i - j), mask)


# -- Python --------------------------------------------------------------------------------------

PYTHON = "Python"


@part(PYTHON, "item in arithmetic")
def with_item(x: torch.Tensor) -> Any:
    return x * x.sum().item()


@part(PYTHON, "item as a size")
def sized_by_item(x: torch.Tensor) -> Any:
    count = (x > 0).sum().item()
    return torch.zeros(count, dtype=x.dtype) + x.sum(), x[: x[0].argmax().item()] * 2


@part(PYTHON, "tolist")
def with_tolist(x: torch.Tensor) -> Any:
    return x + sum(x[0].tolist())


@part(PYTHON, "a branch on data", "data_dependent_branch", gradient=False)
def branching(x: torch.Tensor) -> Any:
    return x.sin() if x.sum() > 0 else x.cos()


@part(PYTHON, "assert on a tensor")
def asserting(x: torch.Tensor) -> Any:
    assert (x.abs() < 1e9).all()
    return x.sin()


@part(PYTHON, "nonzero and boolean masks")
def masked(x: torch.Tensor) -> Any:
    return x[x > 0].sum(), x.nonzero()


@part(PYTHON, "min and max of tensors")
def extremes(x: torch.Tensor) -> Any:
    return min(x[0, 0], x[0, 1]) + x


@part(PYTHON, "x.data = ")
def data_set(x: torch.Tensor) -> Any:
    y = x.clone()
    y.data = x.detach() * 2
    return y.sin()


@maker(PYTHON, "a parameter's data, set and written to", gradient=False)
def parameter_data() -> Program:
    weight = nn.Parameter(torch.ones(3, dtype=torch.float64))

    def program(x: torch.Tensor) -> Any:
        weight.data = weight.data.lerp(x.detach()[0], 0.5)
        scaled = weight.detach() * 2
        scaled.data.clamp_(max=1.0)
        return scaled + x

    return program


@part(PYTHON, "itertools objects returned")
def iterators(x: torch.Tensor) -> Any:
    return list(itertools.accumulate([x, x * 2, x * 3])), itertools.chain([x], [x + 1])


@part(PYTHON, "zip, islice and repeat returned")
def more_iterators(x: torch.Tensor) -> Any:
    return zip([x], [x + 1], strict=True), itertools.islice(itertools.count(1), 2), itertools.repeat(x, 2)


@part(PYTHON, "max by a key", "data_dependent_branch")
def largest_by_key(x: torch.Tensor) -> Any:
    return max([x[0, 0], x[1, 1]], key=lambda t: t * 2) + x


@part(PYTHON, "a list that is filled and emptied")
def filled_and_emptied(x: torch.Tensor) -> Any:
    rows = []
    for i in range(x.shape[0]):
        rows.append(x[i] * i)
    while len(rows) > 2:
        rows.pop()
    return torch.cat(rows)


@part(PYTHON, "a list that grows with the batch")
def growing(x: torch.Tensor) -> Any:
    return torch.stack([row.sin() for row in x]).sum(0)


@maker(PYTHON, "functools.lru_cache")
def caching() -> Program:
    @functools.lru_cache
    def factor(n: int) -> float:
        return math.sqrt(n)

    return lambda x: x * factor(x.shape[1])


@part(PYTHON, "generators")
def generating(x: torch.Tensor) -> Any:
    def parts() -> Iterator[torch.Tensor]:
        for row in x.unbind(1):
            yield row * 2

    return sum(parts())


@part(PYTHON, "a generator that is sent to")
def sent_to(x: torch.Tensor) -> Any:
    def doubling() -> Generator[torch.Tensor, torch.Tensor, None]:
        got = yield x
        yield got * 2

    steps = doubling()
    return steps.send(next(steps) + 1)


@part(PYTHON, "a generator across a break", "print")
def generating_across(x: torch.Tensor) -> Any:
    def parts() -> Iterator[torch.Tensor]:
        for place, row in enumerate(x.unbind(1)):
            if place == 1:
                print(end="")
            yield row * 2

    return sum(parts())


@part(PYTHON, "dataclasses, named tuples, enums", "class", "unsupported_read")
def records(x: torch.Tensor) -> Any:
    @dataclasses.dataclass
    class State:
        value: torch.Tensor
        scale: float = 2.0

    class Two(NamedTuple):
        a: torch.Tensor
        b: torch.Tensor

    class Mode(enum.Enum):
        PLAIN = 1
        DOUBLE = 2

    state = dataclasses.replace(State(x), scale=3.0)
    pair = Two(state.value * state.scale, x)
    return pair.a * Mode.DOUBLE.value + pair.b


@part(PYTHON, "an enum made within")
def enumerated(x: torch.Tensor) -> Any:
    class Mode(enum.Enum):
        PLAIN = 1
        DOUBLE = 2

    return x * Mode.DOUBLE.value, Mode(1).name == "PLAIN"


@part(PYTHON, "an enum of flags, and one of texts, made within")
def flags(x: torch.Tensor) -> Any:
    class Flags(enum.IntFlag):
        A = 1
        B = 2

    class Names(str, enum.Enum):  # noqa: UP042 (another base, another metaclass's work)
        FIRST = "first"

    return x * int(Flags.A | Flags.B), Names("first").name == "FIRST"


@part(PYTHON, "collections")
def containers(x: torch.Tensor) -> Any:
    counts = collections.Counter("hello")
    by_name: dict[str, list[torch.Tensor]] = collections.defaultdict(list)
    for place, name in enumerate("aba"):
        by_name[name].append(x * place)
    queue = collections.deque([x], maxlen=2)
    queue.append(x * counts["l"])
    return {name: torch.stack(parts).sum(0) for name, parts in by_name.items()}, queue.popleft()


@maker(PYTHON, "a user's context manager with state")
def contexts() -> Program:
    log: list[int] = []

    @contextlib.contextmanager
    def noted() -> Iterator[None]:
        log.append(len(log))
        try:
            yield
        finally:
            log.append(-1)

    def program(x: torch.Tensor) -> Any:
        with noted():
            y = x * len(log)
        return y + log[-1]

    return program


@part(PYTHON, "exceptions")
def catching(x: torch.Tensor) -> Any:
    try:
        {}["missing"]
    except KeyError as error:
        return x * len(error.args)
    return x


@part(PYTHON, "warnings", gradient=False)
def warning(x: torch.Tensor) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.warn("from the program", stacklevel=1)
        return x + 1


@part(PYTHON, "print", "print", gradient=False)
def printing(x: torch.Tensor) -> Any:
    y = x + 1
    print(end="")
    return y * 2


@part(PYTHON, "random numbers and the generator's state", gradient=False)
def generator_state(x: torch.Tensor) -> Any:
    state = torch.get_rng_state()
    first = torch.rand(3)
    torch.set_rng_state(state)
    return x * 0 + first.sum() - torch.rand(3).sum()


@part(PYTHON, "torch.random.fork_rng and manual_seed", gradient=False)
def forked(x: torch.Tensor) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        inside = torch.rand(3)
    return x * 0 + inside


@maker(PYTHON, "a generator of the program's own", gradient=False)
def from_a_generator() -> Program:
    generator = torch.Generator()

    def program(x: torch.Tensor) -> Any:
        made = torch.Generator().manual_seed(3)
        return x * 0 + torch.rand(3, generator=generator) + torch.rand(3, generator=made)

    return program


@part(PYTHON, "torch.distributions with validation")
def distributions(x: torch.Tensor) -> Any:
    return torch.distributions.Normal(x, x.exp(), validate_args=True).log_prob(x + 1)


@maker(PYTHON, "lazy modules", gradient=False)
def lazy() -> Program:
    torch.manual_seed(3)
    net = nn.Sequential(nn.LazyLinear(4), nn.ReLU()).double()
    return lambda x: net(x).shape[1] * x


@part(PYTHON, "torch.manual_seed", gradient=False)
def seeded(x: torch.Tensor) -> Any:
    torch.manual_seed(3)
    return torch.rand(3) + x


@part(PYTHON, "torch.initial_seed", "random_state", gradient=False)
def first_seed(x: torch.Tensor) -> Any:
    torch.manual_seed(3)
    return x * torch.initial_seed()


@part(PYTHON, "a categorical distribution")
def categorical(x: torch.Tensor) -> Any:
    found = torch.distributions.Categorical(logits=x, validate_args=True)
    return found.log_prob(torch.zeros(x.shape[0], dtype=torch.int64)), found.entropy()


@part(PYTHON, "a torch-function mode")
def under_mode(x: torch.Tensor) -> Any:
    class Doubling(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            return out * 2 if func is torch.sin else out

    with Doubling():
        return torch.sin(x)


@part(PYTHON, "autocast", gradient=False)
def autocasting(x: torch.Tensor) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        return (x.float() @ x.float().mT).float()


@part(PYTHON, "functools.partial, operator, map, zip")
def functional(x: torch.Tensor) -> Any:
    scaled = functools.partial(torch.mul, other=2)
    return functools.reduce(torch.add, map(scaled, x.unbind(0)))


# -- quantised and low precision -----------------------------------------------------------------

QUANTISED = "Quantised"


@part(QUANTISED, "int8 weights, dequantised", gradient=False)
def int8_weight(x: torch.Tensor) -> Any:
    weight = torch.arange(-6, 6, dtype=torch.int8).reshape(4, 3)
    return x @ (weight.double() * 0.1).mT


@part(QUANTISED, "float8 casts", gradient=False)
def float8(x: torch.Tensor) -> Any:
    return x.to(torch.float8_e4m3fn).to(torch.float64)


@part(QUANTISED, "fake_quantize", gradient=False)
def fake_quantized(x: torch.Tensor) -> Any:
    return torch.fake_quantize_per_tensor_affine(x.float(), 0.1, 0, -128, 127)


@part(QUANTISED, "fake_quantize, with gradients, by channels")
def fake_quantized_by_channels(x: torch.Tensor) -> Any:
    scales, zeros = torch.full((3,), 0.1), torch.zeros(3, dtype=torch.int32)
    return torch.fake_quantize_per_channel_affine(x.float(), scales, zeros, 1, -128, 127).double()


@part(QUANTISED, "int4 weights, unpacked")
def int4_weight(x: torch.Tensor) -> Any:
    packed = torch.arange(40, 46, dtype=torch.uint8).reshape(2, 3)
    levels = torch.stack([(packed & 0xF).to(torch.int8) - 8, (packed >> 4).to(torch.int8) - 8], 1).reshape(4, 3)
    return x @ (levels.double() * 0.1).mT


@part(QUANTISED, "int8 activations, scaled by rows", gradient=False)
def dynamic_int8(x: torch.Tensor) -> Any:
    scale = x.abs().amax(1, keepdim=True) / 127
    levels = (x / scale).round().clamp(-128, 127).to(torch.int8)
    weight = torch.arange(-12, 12, dtype=torch.int8).reshape(3, 8)
    return torch._int_mm(levels.repeat(8, 1), weight)[: x.shape[0]] * scale


@part(QUANTISED, "_scaled_mm of float8", gradient=False)
def scaled_mm(x: torch.Tensor) -> Any:
    a, b = (torch.full((16, 16), v).to(torch.float8_e4m3fn) for v in (1.0, 0.5))
    return torch._scaled_mm(a, b.t(), torch.tensor(0.5), torch.tensor(2.0), out_dtype=torch.float32).double().sum() + x


@part(QUANTISED, "int4 weights, packed for the CPU", gradient=False)
def int4_packed(x: torch.Tensor) -> Any:
    levels = (torch.arange(16 * 64) % 16).int().reshape(16, 64)
    packed = torch._convert_weight_to_int4pack_for_cpu(levels, 1)
    rows = x.float()[:, :1].expand(-1, 64).contiguous()
    return torch._weight_int4pack_mm_for_cpu(rows, packed, 32, torch.ones(2, 16, 2))


@part(QUANTISED, "quantize_per_tensor and dequantize", "operator_without_meta", gradient=False)
def quantised_and_back(x: torch.Tensor) -> Any:
    return torch.quantize_per_tensor(x.float(), 0.1, 0, torch.qint8).dequantize() + x
