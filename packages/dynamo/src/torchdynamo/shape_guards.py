"""Guards on numbers: what capture took for granted of sizes, ints and floats that became symbols."""

from __future__ import annotations

import re
from typing import Any

import torch

from primtorch.symbolic import SCALAR_OPS, Definition, FloatExpr, IntExpr, ShapeEnv, expr_of
from torchdynamo.schemas import Guard, GuardKind, ShapeProgram
from torchdynamo.source_text import source_text
from torchdynamo.sources import Source, TensorSize, TensorStride
from torchdynamo.world import INTEGER_BOUND, Outside

Steps = tuple[tuple[str, Any], ...]


def add_shape_guards(outside: Outside) -> None:
    """Ranges of symbols, the relations that were asked, and strides of tensors with symbolic sizes."""
    guards, env, sources = outside.externals.guards, outside.shape_env, outside.symbol_sources
    for name, source in sources.items():
        shape = _range(name, source, outside)
        if shape is not None:
            guards.add(None, GuardKind.SHAPE, shape, ())
    for guard in shape_guards(outside):
        guards.add(None, guard.kind, guard.payload, guard.user_frames)
    for source, tensor, fake in outside.tensors:
        if any(isinstance(size, torch.SymInt) for size in fake.shape):
            for dim in range(tensor.dim()):
                stride = expr_of(fake.stride(dim))
                program: Steps = (*stride.program(), ("sym", "stride"), ("eq", 0))
                symbols = {n: sources[n] for n in env.roots(stride.symbols())} | {"stride": TensorStride(source, dim)}
                text = f"{source_text(source)}.stride({dim}) == {readable(str(stride), env, sources)}"
                guards.add(None, GuardKind.SHAPE, ShapeProgram(env.spelt_out(program), symbols, text), ())


def shape_guards(outside: Outside, first: int = 0) -> tuple[Guard, ...]:
    """The relations that were asked, from number `first` on."""
    env, sources = outside.shape_env, outside.symbol_sources
    found = []
    for guard in env.guards[first:]:
        symbols = {name: sources[name] for name in env.roots(guard.expr.symbols())}
        text = readable(str(guard.expr), env, sources)
        shape = ShapeProgram(env.spelt_out(guard.expr.program()), symbols, text)
        found.append(Guard(None, GuardKind.SHAPE, shape, guard.stack))
    return tuple(found)


def _range(name: str, source: Source, outside: Outside) -> ShapeProgram | None:
    """Sizes are at least 2, or within the range that the user promised; integers fit in 64 bits with room to add."""
    info = outside.shape_env.symbols[name]
    if isinstance(info.hint, float):
        return None
    sized = isinstance(source, TensorSize)
    low = info.min if sized and info.min is not None else -INTEGER_BOUND
    high = info.max if info.max is not None else INTEGER_BOUND
    where = source_text(source)
    steps: Steps = (("sym", name), ("const", low), ("ge", 0))
    text = f"{where} >= {low}"
    if not sized or info.max is not None:
        steps = (*steps, ("sym", name), ("const", high), ("le", 0), ("and", 0))
        text = f"{low} <= {where} <= {high}" if sized else f"-2**62 <= {where} <= 2**62"
    return ShapeProgram(steps, {name: source}, text)


def readable(text: str, env: ShapeEnv, sources: dict[str, Source]) -> str:
    """An expression's text with symbols by what they stand for."""

    def spelt(match: re.Match[str]) -> str:
        name = match.group()
        definition = env.definitions.get(name)
        if definition is not None:
            return readable(_definition_text(definition), env, sources)
        source = sources.get(name)
        return name if source is None else source_text(source)

    return re.sub(r"\b[sfu]\d+\b", spelt, text)


def _definition_text(definition: Definition) -> str:
    def operand(arg: IntExpr | FloatExpr) -> str:
        return arg.as_operand() if isinstance(arg, IntExpr) else str(arg)

    return SCALAR_OPS[definition.op].text(tuple(map(operand, definition.args)))
