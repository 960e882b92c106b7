"""The state of random generators, as operators that a graph can hold: read, written, seeded, and that of a generator of
the program's own in the place of the default one's.

They are operators of a namespace of their own, so that they keep their place among all else that draws or has an effect
(`effects.is_foreign`). A state is a tensor, whose layout is torch's affair.
"""

from __future__ import annotations

import itertools
import weakref

import torch

from primtorch.fake.tensor import FakeMode, FakeTensor, register_special
from primtorch.spec import TensorSpec

NAMESPACE = "primtorch_random"
_library = torch.library.Library(NAMESPACE, "DEF")
_library.define("state(Device device) -> Tensor")
_library.define("set_state(Tensor state, Device device) -> ()")
_library.define("seed(SymInt seed) -> ()")
_library.define("seeded_state(SymInt seed, Device device) -> Tensor")
_library.define("exchange(SymInt generator) -> ()")

_numbers = itertools.count(1)
_generators: weakref.WeakValueDictionary[int, torch.Generator] = weakref.WeakValueDictionary()
_known: weakref.WeakKeyDictionary[torch.Generator, int] = weakref.WeakKeyDictionary()


def number_of(generator: torch.Generator) -> int:
    """What graphs call a generator by. The number is good in this process, for as long as the generator lives."""
    number = _known.get(generator)
    if number is None:
        number = _known[generator] = next(_numbers)
        _generators[number] = generator
    return number


def default_generator(device: torch.device) -> torch.Generator | None:
    """The generator of calls that name none; None for devices whose generators are not known here."""
    if device.type == "cpu":
        return torch.default_generator
    if device.type != "cuda":
        return None
    torch.cuda.init()
    return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]


def _default(device: torch.device) -> torch.Generator:
    found = default_generator(device)
    if found is None:
        raise RuntimeError(f"the random generator of device {device} is not known")
    return found


def _state(device: torch.device) -> torch.Tensor:
    return _default(device).get_state()


def _set_state(state: torch.Tensor, device: torch.device) -> None:
    _default(device).set_state(state)


def _seed(seed: int) -> None:
    torch.manual_seed(seed)


def _seeded_state(seed: int, device: torch.device) -> torch.Tensor:
    return torch.Generator(device).manual_seed(seed).get_state()


def _exchange(number: int) -> None:
    generator = _generators.get(number)
    if generator is None:
        raise RuntimeError("a compiled function draws from a generator that is no longer there")
    default = _default(generator.device)
    state = default.get_state()
    default.set_state(generator.get_state())
    generator.set_state(state)


def _fake_state(mode: FakeMode, device: torch.device) -> FakeTensor:
    return mode.from_spec(TensorSpec.of(_state(device)))


for _name, _kernel in {
    "state": _state, "set_state": _set_state, "seed": _seed, "seeded_state": _seeded_state, "exchange": _exchange,
}.items():  # fmt: skip
    _library.impl(_name, _kernel, "CompositeExplicitAutograd")

state = torch.ops.primtorch_random.state.default
"""The state of a device's default generator."""
set_state = torch.ops.primtorch_random.set_state.default
"""Gives it to that generator."""
seed = torch.ops.primtorch_random.seed.default
"""`torch.manual_seed`."""
seeded_state = torch.ops.primtorch_random.seeded_state.default
"""The state of a new generator that is given a seed."""
exchange = torch.ops.primtorch_random.exchange.default
"""A generator and the default one of its device change states. A second call undoes the first, but for what was drawn
in between: that, the generator has given."""

register_special(state, _fake_state)
register_special(seeded_state, lambda mode, seed, device: _fake_state(mode, device))
for _op in (set_state, seed, exchange):
    register_special(_op, lambda mode, *args: None)
