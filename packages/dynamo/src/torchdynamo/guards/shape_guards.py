"""Guards on numbers: what capture took for granted of sizes, ints and floats that became symbols."""

from __future__ import annotations

import re
from typing import Protocol

import torch

from primtorch.symbolic import SCALAR_OPS, Definition, FloatExpr, IntExpr, ShapeEnv, ShapeGuard, expr_of
from primtorch.symbolic.expr import Program
from torchdynamo.errors import SizeNotDynamic
from torchdynamo.guards.shape_program import STRIDE, run_program
from torchdynamo.guards.source_text import source_text
from torchdynamo.outside.dynamic_policy import INTEGER_BOUND
from torchdynamo.outside.outside import Outside
from torchdynamo.schemas import Guard, GuardKind, ShapeProgram
from torchdynamo.size_marks import SizeMark
from torchdynamo.sources import Source, TensorSize, TensorStride


class Symbols(Protocol):
    """What is known of a frame's symbols: `Outside`, or what another process has written."""

    @property
    def shape_env(self) -> ShapeEnv:
        """Which symbols there are, and what is known of them."""

    @property
    def symbol_sources(self) -> dict[str, Source]:
        """Where each is read."""

    @property
    def promised(self) -> dict[str, SizeMark]:
        """What the user said of them."""


def add_shape_guards(outside: Outside) -> None:
    """Ranges of symbols, the relations that were asked, and strides of tensors with symbolic sizes."""
    guards, env, sources = outside.externals.guards, outside.shape_env, outside.symbol_sources
    for name, source in sources.items():
        shape = _range(name, source, outside)
        if shape is not None:
            guards.add(None, GuardKind.SHAPE, shape)
    for guard in shape_guards(outside):
        guards.keep(guard)
    for source, tensor, fake in outside.tensors:
        fake = outside.recorder.as_it_came(fake)
        if any(isinstance(size, torch.SymInt) for size in (*fake.shape, *fake.stride())):
            for dim in range(tensor.dim()):
                stride, where = expr_of(fake.stride(dim)), TensorStride(source, dim)
                if sources.get(str(stride)) == where:
                    continue
                program: Program = (*stride.program(), ("sym", STRIDE), ("eq", 0))
                symbols = {n: sources[n] for n in env.roots(stride.symbols(), simplified=False)} | {STRIDE: where}
                text = f"{source_text(source)}.stride({dim}) == {readable(str(stride), env, sources)}"
                guards.add(None, GuardKind.SHAPE, ShapeProgram(env.spelt_out(program), symbols, text))


def shape_guards(known: Symbols, first: int = 0) -> tuple[Guard, ...]:
    """The relations that were asked, from number `first` on."""
    env, sources = known.shape_env, known.symbol_sources
    found = []
    for guard in env.guards[first:]:
        symbols = {name: sources[name] for name in env.roots(guard.expr.symbols(), simplified=False)}
        text = readable(str(guard.expr), env, sources)
        for name, mark in known.promised.items():
            if symbols.keys() == {name}:
                _keep_promise(name, mark, guard, text, known)
        shape = ShapeProgram(env.spelt_out(guard.expr.program()), symbols, text)
        found.append(Guard(None, GuardKind.SHAPE, shape, guard.stack))
    return tuple(found)


def _keep_promise(name: str, mark: SizeMark, guard: ShapeGuard, text: str, known: Symbols) -> None:
    """Raises SizeNotDynamic where a relation that the program asked leaves one size, or not all that were promised."""
    hint = known.shape_env.symbols[name].hint
    assert isinstance(hint, int)
    program = known.shape_env.spelt_out(guard.expr.program())
    bounds = [bound for bound in (mark.low, mark.high) if bound is not None]
    refused = [size for size in bounds if not run_program(program, {name: size})]
    low, high = mark.low or 2, mark.high or 1 << 40
    others = [size for size in (low, hint - 1, hint + 1, 2 * hint, 3 * hint, 1009 * hint, high) if low <= size <= high]
    alone = all(size == hint or not run_program(program, {name: size}) for size in others)
    if not refused and not (alone and low != high):
        return
    where = source_text(known.symbol_sources[name])
    frame = guard.stack[-1] if guard.stack else None
    asked = f"\n  asked at {frame.file}:{frame.line} in {frame.function}" if frame is not None else ""
    what = f"{where} cannot be {refused[0]}" if refused else f"{where} can only be {hint}"
    raise SizeNotDynamic(
        f"a size marked with mark_dynamic: {what}, because the program relies on {text}.{asked}\n"
        "  what to do: change the program, promise a narrower range, or use maybe_mark_dynamic"
    )


def _range(name: str, source: Source, outside: Outside) -> ShapeProgram | None:
    """Sizes and strides are at least 2, or what the user promised; integers fit in 64 bits with room to add."""
    info = outside.shape_env.symbols[name]
    if isinstance(info.hint, float):
        return None
    sized = isinstance(source, (TensorSize, TensorStride))
    low = info.min if sized and info.min is not None else -INTEGER_BOUND
    high = info.max if info.max is not None else INTEGER_BOUND
    where = source_text(source)
    steps: Program = (("sym", name), ("const", low), ("ge", 0))
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
