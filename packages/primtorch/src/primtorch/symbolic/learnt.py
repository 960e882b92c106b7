"""What a capture or a compilation learnt of symbols: the environment of an equal graph learns it again instead."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import field
from types import MappingProxyType

from primtorch.frozen import record
from primtorch.schemas import UserFrame
from primtorch.symbolic.float_expr import Definition
from primtorch.symbolic.relation import BoolExpr
from primtorch.symbolic.scalar_ops import SCALAR_OPS
from primtorch.symbolic.shape_env import ShapeEnv


@record
class NewSymbol:
    """A symbol that was made: computed from others, one that only the data tells, or one that is read at each call."""

    name: str
    definition: Definition | None
    min: int | None
    max: int | None


@record
class Learnt:
    """What an environment came to know.

    Attributes:
        symbols: in their order.
        assumptions: what the program asserts of its data.
        frames: the lines that assert each.
    """

    symbols: tuple[NewSymbol, ...] = ()
    guards: tuple[BoolExpr, ...] = ()
    assumptions: tuple[BoolExpr, ...] = ()
    frames: tuple[tuple[UserFrame, ...], ...] = field(default=(), compare=False)


@record
class Mark:
    """How much an environment knew: it only learns."""

    symbols: int
    guards: int
    assumptions: int


def mark_of(env: ShapeEnv) -> Mark:
    """What `learnt_since` begins from."""
    return Mark(len(env.symbols), len(env.guards), len(env.assumptions))


@record
class Given:
    """What a symbol is in an example, and where that was read, as text."""

    hint: int | float
    source: str


def learnt_since(env: ShapeEnv, mark: Mark, read: Container[str] = ()) -> Learnt | None:
    """What came to be known; None where a symbol is among it that was given a value, unless its name is among those
    that are `read` at each call: its source is not known.
    """
    made = []
    for info in list(env.symbols.values())[mark.symbols :]:
        definition = env.definitions.get(info.name)
        if definition is None and info.backed and info.name not in read:
            return None
        made.append(NewSymbol(info.name, definition, info.min, info.max))
    guards, assumptions = env.guards[mark.guards :], env.assumptions[mark.assumptions :]
    asserted = tuple(a.expr for a in assumptions)
    return Learnt(tuple(made), tuple(g.expr for g in guards), asserted, tuple(a.stack for a in assumptions))


def learn(env: ShapeEnv, learnt: Learnt, given: Mapping[str, Given] = MappingProxyType({})) -> bool:
    """Has an environment know it too, with guards as if it had asked; False where the example is another case.

    Args:
        given: of symbols that are read at each call, what they are in the example.
    """
    values, known = _values(env, learnt, given), len(env.guards)
    if values is None or not all(g.symbols() <= values.keys() and g.evaluate(values) for g in learnt.guards):
        return False
    try:
        if any(_made(env, new, given) != new.name for new in learnt.symbols):
            return False
    except (ArithmeticError, TypeError, ValueError):  # as in the example
        return False
    for guard in learnt.guards:
        if env.decide(guard) is not True:
            env.assume(guard, env.guards)
    order = {guard: place for place, guard in enumerate(learnt.guards)}
    env.guards[known:] = sorted(env.guards[known:], key=lambda guard: order.get(guard.expr, len(order)))
    for assumption, frames in zip(learnt.assumptions, learnt.frames, strict=True):
        with env.asked_by(lambda frames=frames: frames):  # type: ignore[misc]
            env.assume(assumption, env.assumptions)
    return True


def _values(env: ShapeEnv, learnt: Learnt, given: Mapping[str, Given]) -> Mapping[str, int] | None:
    """Each symbol's value in the example, where it has one; None where one of the new symbols cannot have one."""
    values: dict[str, int] = {name: info.hint for name, info in env.symbols.items() if info.hint is not None}  # type: ignore[misc]
    for new in learnt.symbols:
        if new.name in values:
            return None
        if new.name in given:
            values[new.name] = given[new.name].hint  # type: ignore[assignment]
            continue
        definition = new.definition
        if definition is None or not all(arg.symbols() <= values.keys() for arg in definition.args):
            continue
        try:
            values[new.name] = SCALAR_OPS[definition.op].function(*(a.evaluate(values) for a in definition.args))
        except (ArithmeticError, TypeError, ValueError):
            return None
    return values


def _made(env: ShapeEnv, new: NewSymbol, given: Mapping[str, Given]) -> str:
    """Makes the symbol, and gives its name there."""
    if new.name in given:
        hint, source = given[new.name].hint, given[new.name].source
        if isinstance(hint, float):
            return str(env.float_symbol(hint, source))
        return str(env.symbol(hint, source, min=0 if new.min is None else new.min, max=new.max))
    if new.definition is not None:
        return str(env.define(new.definition.op, *new.definition.args))
    made = env.unbacked_float() if new.name.startswith("uf") else env.unbacked(min=new.min or 0, max=new.max)
    return str(made)
