"""Reductions and scans as text: the variables that they live in, and how an element changes them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from torchinductor.codegen.cpp.expressions import OPERATIONS, constant_text, value_type
from torchinductor.codegen.cpp.stage_text import StageText, Value
from torchinductor.ops import ScanKind


@dataclass(slots=True)
class Accumulator:
    """A reduction's variables: `name` holds the result, `part` the float32 sum of the current block."""

    name: str
    kind: str
    dtype: torch.dtype  # of the reduced value
    part: str | None

    @property
    def arg(self) -> bool:
        """Whether the result is a position: int64."""
        return self.kind in ("argmax", "argmin")


_IDENTITY = {"sum": 0, "prod": 1, "any": False, "all": True}
_COMBINE = {
    "sum": "add",
    "prod": "mul",
    "amax": "maximum",
    "amin": "minimum",
    "any": "bitwise_or",
    "all": "bitwise_and",
}


def lowest(kind: str, dtype: torch.dtype) -> str:
    """The identity of a maximum or minimum."""
    if dtype == torch.bool:
        return "false" if "max" in kind else "true"
    if dtype.is_floating_point:
        return constant_text(float("-inf") if "max" in kind else float("inf"), dtype)
    info = torch.iinfo(dtype)
    return constant_text(info.min if "max" in kind else info.max, dtype)


def accumulate(text: StageText, made: Accumulator, value: Value, place: str | None) -> None:
    """Adds a value to a reduction whose result is one number. `place`: the text of the element's position."""
    kind, name, v = made.kind, made.name, value.text
    type_ = value_type(made.dtype)
    inside = text.inside
    if made.arg:
        assert place is not None
        _find_best(text, made, v, place)
    elif kind in ("amax", "amin"):
        sign = ">" if kind == "amax" else "<"
        text.declared.append(f"{type_} {name} = {lowest(kind, made.dtype)};")
        inside.append(f"{name} = {v} {sign} {name} ? {v} : {name};")
        text.reductions.append(f"reduction({kind[1:]}:{name})")
        if made.dtype.is_floating_point:
            text.declared.append(f"int {name}_nan = 0;")
            inside.append(f"{name}_nan |= ({v} != {v});")
            text.reductions.append(f"reduction(|:{name}_nan)")
            text.finishing.append(f"if ({name}_nan) {name} = {constant_text(float('nan'), made.dtype)};")
    elif kind in ("any", "all"):
        text.declared.append(f"int {name} = {int(kind == 'all')};")
        sign = "|" if kind == "any" else "&"
        inside.append(f"{name} {sign}= (int){v};")
        text.reductions.append(f"reduction({sign}:{name})")
    else:
        sign = "+" if kind == "sum" else "*"
        target = name
        if made.part is not None and text.layout.narrow:
            _sum_up_places(text, made, v)
            return
        if made.part is not None:
            text.declared.append(f"double {name} = 0;")
            text.opening.append(f"float {made.part} = 0;")
            text.closing.append(f"{name} += (double){made.part};")
            target = made.part
        else:
            text.declared.append(f"{type_} {name} = {_IDENTITY[kind]};")
        inside.append(f"{target} {sign}= {v};")
        text.reductions.append(f"reduction({sign}:{target})")


def _sum_up_places(text: StageText, made: Accumulator, value: str) -> None:
    """Adds a value to the sum of its place in the innermost loop; behind the loops of a block, these to the result."""
    name, part, loop = made.name, made.part, text.loops[-1]
    text.declared.append(f"double {name} = 0;")
    text.opening.append(f"float {part}[{text.layout.narrow}] = {{}};")
    if loop.start == "0":  # few places, whose number is known
        text.closing.append(f"for (int k = 0; k < {text.layout.narrow}; k++) {name} += (double){part}[k];")
        text.inside.append(f"{part}[{loop.var}] += {value};")
        return
    text.closing.append(f"#pragma omp simd reduction(+:{name})")
    text.closing.append(f"for (i64 k = 0; k < {loop.stop} - {loop.start}; k++) {name} += (double){part}[k];")
    text.inside.append(f"{part}[{loop.var} - {loop.start}] += {value};")


def _find_best(text: StageText, made: Accumulator, value: str, place: str) -> None:
    """A block's best value by vectors; where it beats the best so far, which is seldom, its place in the block.

    The first of equal values wins, and a NaN wins over all that is none. Blocks come in the order of positions where
    there is one inner axis (`ascending`); else positions are compared.
    """
    name, type_, loop = made.name, value_type(made.dtype), text.loops[-1]
    assert loop.most is not None
    largest, ascending = made.kind == "argmax", text.layout.ascending
    low = lowest(made.kind, made.dtype)
    text.declared.append(f"{type_} {name}_v = {low}, {name}_all[{loop.most}]; i64 {name} = {0 if ascending else -1};")
    text.opening.append(f"{type_} {name}_m = {low};")
    text.inside.append(f"{name}_all[{loop.var} - {loop.start}] = {value};")
    text.inside.append(f"{name}_m = {value} {'>' if largest else '<'} {name}_m ? {value} : {name}_m;")
    text.reductions.append(f"reduction({'max' if largest else 'min'}:{name}_m)")
    if made.dtype.is_floating_point:
        text.opening.append(f"int {name}_nan = 0;")
        text.inside.append(f"{name}_nan |= ({value} != {value});")
        text.reductions.append(f"reduction(|:{name}_nan)")
        text.closing.append(f"if ({name}_nan) {name}_m = {constant_text(float('nan'), made.dtype)};")
    beats = f"beats<{'true' if largest else 'false'}>"
    found = f"const i64 {loop.var} = {loop.start} + first_of({name}_all, {loop.stop} - {loop.start}, {name}_m);"
    if ascending:
        text.closing.append(f"if ({beats}({name}_m, {name}_v)) {{ {found} {name} = {place}; {name}_v = {name}_m; }}")
        return
    better = f"{name} < 0 || {beats}({name}_m, {name}_v)"
    text.closing.append(f"if ({name} < 0 || !{beats}({name}_v, {name}_m)) {{")
    text.closing.append(f"  {found} const i64 at = {place};")
    text.closing.append(f"  if ({better} || at < {name}) {{ {name} = at; {name}_v = {name}_m; }}")
    text.closing.append("}")


def accumulate_lanes(text: StageText, made: Accumulator, value: Value, position: Value | None) -> None:
    """Adds a value to its lane's number."""
    kind, name, v, lanes = made.kind, made.name, value.text, text.layout.lane_count
    type_, lane = value_type(made.dtype), text.lane
    inside = text.inside
    each = f"for (int k = 0; k < {lanes}; k++)"
    if made.arg:
        assert position is not None
        sign = ">" if kind == "argmax" else "<"
        text.declared.append(f"{type_} {name}_v[{lanes}]; i64 {name}[{lanes}];")
        first = 0 if text.layout.ascending else -1
        text.declared.append(f"{each} {{ {name}_v[k] = {lowest(kind, made.dtype)}; {name}[k] = {first}; }}")
        better, at = f"{name}_better", None if text.layout.ascending else f"{name}[{lane}]"
        test = _better(sign, v, f"{name}_v[{lane}]", position.text, at, made.dtype)
        inside.append(f"const bool {better} = {test};")
        inside.append(f"{name}_v[{lane}] = {better} ? {v} : {name}_v[{lane}];")
        inside.append(f"{name}[{lane}] = {better} ? {position.text} : {name}[{lane}];")
        return
    identity = lowest(kind, made.dtype) if kind in ("amax", "amin") else str(int(_IDENTITY[kind]))
    if made.part is not None:
        text.declared.append(f"double {name}[{lanes}]; float {made.part}[{lanes}];")
        text.declared.append(f"{each} {{ {name}[k] = 0; {made.part}[k] = 0; }}")
        inside.append(f"{made.part}[{lane}] += {v};")
        text.closing.append(f"{each} {{ {name}[k] += (double){made.part}[k]; {made.part}[k] = 0; }}")
        return
    text.declared.append(f"{type_} {name}[{lanes}];")
    text.declared.append(f"{each} {name}[k] = {identity};")
    combined = OPERATIONS[_COMBINE[kind]](made.dtype, f"{name}[{lane}]", v)
    inside.append(f"{name}[{lane}] = {combined};")


def accumulate_moments(text: StageText, made: Accumulator, total: Accumulator, value: Value) -> None:
    """Adds up each lane's squares about its mean in one pass over memory with its sum `total`: a block's rows are
    summed up, then their squares about the block's own mean, and these are moved to the mean of all (Chan, Golub and
    LeVeque, 1979). The sum of the gaps mends what the block's mean lost by rounding, in the squares and in the total.
    """
    name, lane, lanes = made.name, text.lane, text.layout.lane_count
    each = f"for (int k = 0; k < {lanes}; k++)"
    mean, off, gaps, squares = (f"{name}_{part}" for part in ("mean", "off", "gaps", "part"))
    text.declared.append(f"double {name}[{lanes}], {off}[{lanes}], {name}_n = 0;")
    text.declared.append(f"float {mean}[{lanes}], {gaps}[{lanes}], {squares}[{lanes}];")
    text.declared.append(f"{each} {name}[k] = {gaps}[k] = {squares}[k] = 0;")
    text.between.append(f"const double m = {text.block.stop} - {text.block.start}, n = {name}_n;")
    where = f"{off}[k] = {mean}[k] - (n > 0 ? {total.name}[k] / n : 0);"
    text.between.append(f"{each} {{ {mean}[k] = {total.part}[k] / m; {where} {total.part}[k] = 0; }}")
    gap = f"const float {name}_gap = {value.text} - {mean}[{lane}];"
    adding = [gap, f"{gaps}[{lane}] += {name}_gap;", f"{squares}[{lane}] += {name}_gap * {name}_gap;"]
    text.second = [*map(list, text.values[:-1]), [*text.values[-1], *adding]]
    mended = f"const double g = {gaps}[k], o = {off}[k] + g / m; {total.name}[k] += m * {mean}[k] + g;"
    moved = f"{name}[k] += {squares}[k] - g * g / m + o * o * n * m / (n + m); {gaps}[k] = {squares}[k] = 0;"
    text.closing += [f"{each} {{ {mended} {moved} }}", f"{name}_n += m;"]


def run_along(
    text: StageText, name: str, kind: ScanKind, value: Value, position: Value | None
) -> tuple[tuple[str, torch.dtype], ...]:
    """Adds a value to a scan's running state; returns the texts and types of what it comes to at this element."""
    type_, v, lanes = value_type(value.dtype), value.text, text.layout.lanes
    # As in eager, what is carried on from element to element keeps more digits than it is stored with.
    wide = "double" if value.dtype == torch.float32 and not kind.startswith("cum") else type_
    if text.layout.running:
        loop = text.loops[-1]
        text.declared.append(f"{wide} {name} = 0; {type_} {name}_all[{loop.most}];")
        text.inside.append(f"{name}_all[{loop.var} - {loop.start}] = {v};")
        text.between.append(f"{name} = run_sum({name}_all, {loop.stop} - {loop.start}, {name});")
        text.pass_again()
        return ((f"{name}_all[{loop.var} - {loop.start}]", value.dtype),)
    neutral = {"sum": "0", "prod": "1"}
    start = neutral.get(kind) or lowest("min" if kind == "cummin" else "max", value.dtype)
    _declare(text, wide, name, start)
    slot = "" if lanes is None else f"[{text.lane}]"
    state = f"{name}{slot}"
    text.sequential |= lanes is None
    if position is not None:
        _declare(text, "i64", f"{name}_at", "0")
        sign = ">=" if kind == "cummax" else "<="
        nan = f" || {v} != {v}" if value.dtype.is_floating_point else ""
        place = f"{name}_at{slot}"
        text.inside.append(f"if ({v} {sign} {state}{nan}) {{ {state} = {v}; {place} = {position.text}; }}")
        return (state, value.dtype), (place, torch.int64)
    if kind == "logcumsumexp":
        text.inside.append(f"{state} = log_add({state}, ({wide}){v});")
    else:
        text.inside.append(f"{state} {'+' if kind == 'sum' else '*'}= {v};")
    return ((f"({type_}){state}", value.dtype),)


def _declare(text: StageText, type_: str, name: str, start: str) -> None:
    """A variable, or one for each lane, that begins with a value."""
    if text.layout.lanes is None:
        text.declared.append(f"{type_} {name} = {start};")
        return
    count = text.layout.lane_count
    text.declared.append(f"{type_} {name}[{count}];")
    text.declared.append(f"for (int k = 0; k < {count}; k++) {name}[k] = {start};")


_OPPOSITE = str.maketrans("<>", "><")


def _better(sign: str, value: str, best: str, position: str, at: str | None, dtype: torch.dtype) -> str:
    """Whether an element takes the place of the best one. Where loops may run in any order, positions are compared."""
    greater, equal = f"({value} {sign} {best})", f"({value} == {best})"
    if at is None:
        if not dtype.is_floating_point:
            return greater
        return f"(!({value} {sign.translate(_OPPOSITE)}= {best}) && {best} == {best})"
    if dtype.is_floating_point:
        greater = f"({greater} | (({value} != {value}) & ({best} == {best})))"
        equal = f"({equal} | (({value} != {value}) & ({best} != {best})))"
    return f"({at} < 0) | {greater} | ({equal} & ({position} < {at}))"
