"""Random generators in the graph: their states read and written, seeds, and draws from generators of the program's own.

What is drawn from a generator, the graph draws from the default one of its device, which is given the generator's state
before and its own again behind. A generator of the outside is known to the graph by a number that is read at each call,
so that any generator may come in its place; one that the program makes is its state, a tensor of the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import fx

from primtorch import random_state
from torchdynamo.graph.recorder import tensors_in
from torchdynamo.graph.scalars import SYMBOLIC
from torchdynamo.interpreter.protocol import Args, Callee, Kwargs, Rule
from torchdynamo.outside.outside import Outside
from torchdynamo.reasons import BreakGraph
from torchdynamo.schemas import GuardKind
from torchdynamo.sources import Attribute, Reading

_FIRST_SEED = torch.Generator().initial_seed()  # of a generator that nobody seeded
_CPU = torch.device("cpu")


class RandomState:
    """The generators of one capture."""

    def __init__(self, outside: Outside) -> None:
        self.outside = outside
        self.recorder = outside.recorder
        self.recorder.draw = self.draw
        self._made: dict[int, tuple[torch.Generator, torch.Tensor]] = {}  # by identity, with its present state

    def rules(self) -> tuple[tuple[object, Rule], ...]:
        """The functions of generators' states, and what calls of them mean."""
        return (
            (torch.Generator, self.make),
            (torch.manual_seed, self.seed_all),
            (torch.get_rng_state, lambda fn, args, kwargs: self.state_of(_CPU)),
            (torch.set_rng_state, self.set_default_state),
            (torch.cuda.get_rng_state, self.state_of_cuda),
            (torch.cuda.set_rng_state, self.set_state_of_cuda),
        )

    # -- the default generators --------------------------------------------------------------

    def seed_all(self, fn: Callee, args: Args, kwargs: Kwargs) -> object:
        """`torch.manual_seed(seed)`."""
        self._do(random_state.seed, (_seed_of(fn, args, kwargs),))
        return self.outside.externals.hold(torch.default_generator, "default_generator")

    def state_of(self, device: torch.device) -> torch.Tensor:
        """The state of a device's default generator: a tensor of bytes in memory of its own."""
        return cast(torch.Tensor, self._do(random_state.state, (device,)))

    def set_default_state(self, fn: Callee, args: Args, kwargs: Kwargs) -> None:
        """`torch.set_rng_state(new_state)`."""
        (state,) = _bound(("new_state",), fn, args, kwargs)
        self._do(random_state.set_state, (self._checked(state), _CPU))

    def state_of_cuda(self, fn: Callee, args: Args, kwargs: Kwargs) -> torch.Tensor:
        """`torch.cuda.get_rng_state(device)`."""
        (device,) = _bound(("device",), fn, args, kwargs, "cuda")
        return self.state_of(_cuda(device))

    def set_state_of_cuda(self, fn: Callee, args: Args, kwargs: Kwargs) -> None:
        """`torch.cuda.set_rng_state(new_state, device)`."""
        state, device = _bound(("new_state", "device"), fn, args, kwargs, "cuda")
        self._do(random_state.set_state, (self._checked(state), _cuda(device)))

    # -- generators of the program's own -----------------------------------------------------

    def make(self, fn: Any, args: Args, kwargs: Kwargs) -> torch.Generator:
        """`torch.Generator(device)`."""
        made: torch.Generator = fn(*args, **kwargs)
        if random_state.default_generator(made.device) is None:
            raise _refusal(f"a generator of device {made.device}")
        state = self._do(random_state.seeded_state, (_FIRST_SEED, made.device))
        self._made[id(made)] = made, cast(torch.Tensor, state)
        return made

    def method(self, generator: torch.Generator, fn: Callee, args: Args, kwargs: Kwargs) -> object:
        """A method of a generator."""
        name = fn.__name__
        if name not in ("manual_seed", "get_state", "set_state"):
            raise _refusal(f"{name}() of a generator")
        if name == "manual_seed":
            self._set(generator, self._do(random_state.seeded_state, (_seed_of(fn, args, kwargs), generator.device)))
            return generator
        if name == "set_state":
            (state,) = _bound(("new_state",), fn, args, kwargs)
            self._set(generator, self._do(torch.clone, (self._checked(state),)))
            return generator
        if id(generator) in self._made:
            return self._do(torch.clone, (self._made[id(generator)][1],))
        with self._in_place_of_default(generator):
            return self.state_of(generator.device)

    def _set(self, generator: torch.Generator, state: Any) -> None:
        if id(generator) in self._made:
            self._made[id(generator)] = generator, state
            return
        with self._in_place_of_default(generator):
            self._do(random_state.set_state, (state, generator.device))

    def draw(self, func: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        """A call that draws from the generator among its arguments."""
        generators = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Generator)]
        args = tuple(None if isinstance(value, torch.Generator) else value for value in args)
        kwargs = {name: value for name, value in kwargs.items() if not isinstance(value, torch.Generator)}
        if len(generators) != 1:
            raise _refusal("a call with several generators")
        (generator,) = generators
        with self._in_place_of_default(generator):
            result = self.recorder.record(func, args, kwargs)
            if any(tensor.device.type != generator.device.type for tensor in tensors_in(result)):
                raise _refusal("a generator of another device than the call's")
        return result

    @contextmanager
    def _in_place_of_default(self, generator: torch.Generator) -> Iterator[None]:
        """A block in which the default generator of its device has a generator's state."""
        last = next(reversed(self.recorder.graph.nodes), None)
        try:
            if id(generator) in self._made:
                before = self.state_of(generator.device)
                self._do(random_state.set_state, (self._made[id(generator)][1], generator.device))
                yield
                after = self.state_of(generator.device)
                self._do(random_state.set_state, (before, generator.device))
                self._made[id(generator)] = generator, after
            else:
                number = self._number_of(generator)
                self._do(random_state.exchange, (number,))
                yield
                self._do(random_state.exchange, (number,))
        except BaseException:
            self._take_back(last)
            raise

    def _number_of(self, generator: torch.Generator) -> torch.SymInt:
        """The number by which graphs call a generator of the outside: another one may come in its place."""
        known = self.outside.externals.lookup(generator)
        if known is None:
            raise _refusal("a generator that capture did not see")
        device = Attribute(known.source, "device", native=True)
        self.outside.externals.guard(device, GuardKind.EQUALS, generator.device)
        number = random_state.number_of(generator)
        return cast(
            torch.SymInt, self.outside.symbol_at(Reading(known.source, random_state.number_of), number, 0, None)
        )

    def _take_back(self, last: fx.Node | None) -> None:
        """The graph ends before the block: nothing of it happens within."""
        for node in reversed(list(self.recorder.graph.nodes)):
            if node is last:
                return
            if node.op != "placeholder":
                node.meta.pop("effect", None)

    def _do(self, operator: Callable[..., object], args: tuple[object, ...]) -> object:
        if self.recorder.regions.open:
            raise _refusal("within a function that becomes a graph of its own")
        with torch._C.DisableTorchFunction():  # the recorder is told here already
            return self.recorder.record(operator, self.recorder.adopt_all(args), {})

    def _checked(self, state: object) -> torch.Tensor:
        if not isinstance(state, torch.Tensor) or state.dtype is not torch.uint8:
            raise _refusal("a state that is no tensor of bytes")
        return state


def _cuda(device: object) -> torch.device:
    return torch.device("cuda", device) if isinstance(device, int) else torch.device(cast(str, device))


def _seed_of(fn: Callee, args: Args, kwargs: Kwargs) -> object:
    (seed,) = _bound(("seed",), fn, args, kwargs)
    if not isinstance(seed, SYMBOLIC) and not (type(seed) is int and -(2**63) <= seed < 2**63):
        raise _refusal("a seed that is no int of 64 bits")
    return seed


def _bound(names: tuple[str, ...], fn: Callee, args: Args, kwargs: Mapping[str, object], *defaults: object) -> Args:
    """The arguments of these names; the last ones have defaults."""
    given: dict[str, object] = dict(zip(reversed(names), reversed(defaults), strict=False))
    given |= {**dict(zip(names, args, strict=False)), **kwargs}
    if given.keys() != set(names) or len(args) > len(names):
        raise _refusal(f"{getattr(fn, '__name__', fn)}() with other arguments than its own")
    return tuple(given[name] for name in names)


def _refusal(why: str) -> BreakGraph:
    return BreakGraph("random_state", why)
