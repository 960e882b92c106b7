"""Instructions that compute: operators, comparisons, formatting, containers, unpacking, structural matching."""

from __future__ import annotations

import builtins
import collections
import dis
import functools
import opcode as stdlib_opcode
import types
from collections.abc import Callable

from torchdynamo.interpreter.exceptions import after_clauses
from torchdynamo.interpreter.iterators import is_iterable
from torchdynamo.interpreter.protocol import MISSING
from torchdynamo.interpreter.state import FrameState, opcode
from torchdynamo.interpreter.structural import stored_key

_BINARY = tuple(symbol for _, symbol in stdlib_opcode._nb_ops)  # type: ignore[attr-defined]
_CONVERSIONS = ("", "str", "repr", "ascii")
_SEQUENCE_FLAG = 1 << 5  # Py_TPFLAGS_SEQUENCE, Py_TPFLAGS_MAPPING
_MAPPING_FLAG = 1 << 6
# Types whose only positional subpattern matches the subject itself.
_MATCH_SELF = (bool, bytearray, bytes, dict, float, frozenset, int, list, set, str, tuple)


class OperatorOpcodes(FrameState):
    """Operators, containers that are built and taken apart, patterns of `match`."""

    __slots__ = ()

    # -- operators --------------------------------------------------------------------------

    @opcode(until=(3, 11))
    def UNARY_POSITIVE(self, _: int) -> None:
        self.stack[-1] = self.world.unary("+", self.stack[-1])

    @opcode()
    def UNARY_NEGATIVE(self, _: int) -> None:
        self.stack[-1] = self.world.unary("-", self.stack[-1])

    @opcode()
    def UNARY_INVERT(self, _: int) -> None:
        self.stack[-1] = self.world.unary("~", self.stack[-1])

    @opcode()
    def UNARY_NOT(self, _: int) -> None:
        self.stack[-1] = not self.world.truth(self.stack[-1])

    @opcode(since=(3, 13))
    def TO_BOOL(self, _: int) -> None:
        self.stack[-1] = self._truth_ahead(self.stack[-1])

    def _truth_ahead(self, value: object) -> bool:
        """The truth of a value, which a branch behind this instruction may be about."""
        decoded, following = self.decoded, self.index
        branch, target = dis.opname[decoded.opcodes[following]], decoded.program[following].operand
        if branch == "POP_JUMP_IF_TRUE":
            return self.branches_on(value, target, following + 1)
        if branch == "POP_JUMP_IF_FALSE":
            return self.branches_on(value, following + 1, target)
        return self.world.truth(value)

    @opcode()
    def BINARY_OP(self, argument: int) -> None:
        symbol = _BINARY[argument]
        right = self.stack.pop()
        left = self.stack[-1]
        if argument >= 13:
            self.stack[-1] = self.world.inplace(symbol[:-1], left, right)
        else:
            self.stack[-1] = self.world.binary(symbol, left, right)

    @opcode("COMPARE_OP", until=(3, 11))
    def COMPARE_OP(self, argument: int) -> None:
        right = self.stack.pop()
        self.stack[-1] = self.world.compare(dis.cmp_op[argument], self.stack[-1], right)

    @opcode("COMPARE_OP", since=(3, 12), until=(3, 12))
    def COMPARE_OP_shifted(self, argument: int) -> None:
        right = self.stack.pop()
        self.stack[-1] = self.world.compare(dis.cmp_op[argument >> 4], self.stack[-1], right)

    @opcode("COMPARE_OP", since=(3, 13))
    def COMPARE_OP_to_bool(self, argument: int) -> None:
        right = self.stack.pop()
        value = self.world.compare(dis.cmp_op[argument >> 5], self.stack[-1], right)
        self.stack[-1] = self._truth_ahead(value) if argument & 16 else value

    @opcode()
    def IS_OP(self, invert: int) -> None:
        right = self.stack.pop()
        self.stack[-1] = self.world.is_same(self.stack[-1], right) != bool(invert)

    @opcode()
    def CONTAINS_OP(self, invert: int) -> None:
        container = self.stack.pop()
        self.stack[-1] = self.world.contains(container, self.stack[-1]) != bool(invert)

    # -- formatting -------------------------------------------------------------------------

    @opcode(until=(3, 12))
    def FORMAT_VALUE(self, flags: int) -> None:
        spec = self.stack.pop() if flags & 4 else ""
        value = self.stack.pop()
        if flags & 3:
            value = self.world.convert(value, _CONVERSIONS[flags & 3])
        self.stack.append(self.world.format_value(value, spec))

    @opcode(since=(3, 13))
    def CONVERT_VALUE(self, conversion: int) -> None:
        self.stack[-1] = self.world.convert(self.stack[-1], _CONVERSIONS[conversion])

    @opcode(since=(3, 13))
    def FORMAT_SIMPLE(self, _: int) -> None:
        self.stack[-1] = self.world.format_value(self.stack[-1], "")

    @opcode(since=(3, 13))
    def FORMAT_WITH_SPEC(self, _: int) -> None:
        spec = self.stack.pop()
        self.stack[-1] = self.world.format_value(self.stack[-1], spec)

    @opcode()
    def BUILD_STRING(self, count: int) -> None:
        self.stack.append(self.world.join_texts(self.pop_many(count)))

    # -- containers -------------------------------------------------------------------------

    @opcode()
    def BUILD_TUPLE(self, count: int) -> None:
        self.stack.append(tuple(self.pop_many(count)))

    @opcode()
    def BUILD_LIST(self, count: int) -> None:
        self.stack.append(self.pop_many(count))

    @opcode()
    def BUILD_SET(self, count: int) -> None:
        made: set[object] = set()
        for part in self.pop_many(count):
            made.add(self.key(made, part))
        self.stack.append(made)

    def key(self, table: object, key: object) -> object:
        """The key as `table` knows it, hashed and compared through the world."""
        self.world.tell_apart(key)
        return stored_key(self.world, table, key)

    @opcode()
    def BUILD_MAP(self, count: int) -> None:
        flat = self.pop_many(2 * count)
        made: dict[object, object] = {}
        for key, value in zip(flat[::2], flat[1::2], strict=True):
            made[self.key(made, key)] = value
        self.stack.append(made)

    @opcode()
    def BUILD_CONST_KEY_MAP(self, count: int) -> None:
        keys = self.stack.pop()
        self.stack.append(dict(zip(keys, self.pop_many(count), strict=True)))

    @opcode()
    def BUILD_SLICE(self, count: int) -> None:
        self.stack.append(slice(*self.pop_many(count)))

    @opcode()
    def LIST_APPEND(self, depth: int) -> None:
        value = self.stack.pop()
        self.stack[-depth].append(value)

    @opcode()
    def SET_ADD(self, depth: int) -> None:
        value = self.stack.pop()
        self.stack[-depth].add(self.key(self.stack[-depth], value))

    @opcode()
    def MAP_ADD(self, depth: int) -> None:
        key, value = self.pop_many(2)
        self.stack[-depth][self.key(self.stack[-depth], key)] = value

    @opcode()
    def LIST_EXTEND(self, depth: int) -> None:
        iterable = self.stack.pop()
        if not is_iterable(iterable):
            raise TypeError(f"Value after * must be an iterable, not {type(iterable).__name__}")
        self.stack[-depth].extend(self.consume(self.world.iterate(iterable)))

    @opcode()
    def SET_UPDATE(self, depth: int) -> None:
        given, made = self.stack.pop(), self.stack[-depth]
        if type(given) is frozenset and not made:  # of constants: in the order that C code gives a set of them
            made.update(given)
            return
        iterator = self.world.iterate(given)
        for part in self.consume(iterator):
            made.add(self.key(made, part))

    def consume(self, iterator: object) -> list[object]:
        """All that an iterator still gives."""
        values = []
        advance = self.world.advance
        while True:
            try:
                values.append(advance(iterator))
            except StopIteration:
                return values

    @opcode()
    def LIST_TO_TUPLE(self, _: int) -> None:
        self.stack[-1] = tuple(self.stack[-1])

    @opcode()
    def DICT_UPDATE(self, depth: int) -> None:
        mapping = self.stack.pop()
        if not isinstance(mapping, dict) and not hasattr(type(mapping), "keys"):
            raise TypeError(f"'{type(mapping).__name__}' object is not a mapping")
        self.stack[-depth].update(self.mapping_items(mapping))

    @opcode()
    def DICT_MERGE(self, depth: int) -> None:
        """The keyword arguments of a call with `**mapping`; the callee lies below, for the message."""
        mapping = self.stack.pop()
        target = self.stack[-depth]
        name = _callee_name(self.stack, depth)
        if not isinstance(mapping, dict) and not hasattr(type(mapping), "keys"):
            raise TypeError(f"{name} argument after ** must be a mapping, not {type(mapping).__name__}")
        for key, value in self.mapping_items(mapping).items():
            if key in target:
                raise TypeError(f"{name} got multiple values for keyword argument '{key}'")
            target[key] = value

    def mapping_items(self, mapping: object) -> dict[object, object]:
        """A mapping as a dict, by its `keys()` and items."""
        world = self.world
        if isinstance(mapping, dict) and type(mapping).__iter__ in (dict.__iter__, collections.OrderedDict.__iter__):
            return mapping
        keys = self.consume(world.iterate(world.call(world.getattr(mapping, "keys"), (), {})))
        return {key: world.getitem(mapping, key) for key in keys}

    # -- unpacking --------------------------------------------------------------------------

    @opcode()
    def UNPACK_SEQUENCE(self, count: int) -> None:
        value = self.stack.pop()
        if type(value) is tuple or type(value) is list:
            values = list(value)
        else:
            values = self.take(value, count + 1)
        if len(values) > count:
            raise ValueError(f"too many values to unpack (expected {count})")
        if len(values) < count:
            raise ValueError(f"not enough values to unpack (expected {count}, got {len(values)})")
        values.reverse()
        self.stack.extend(values)

    def take(self, value: object, limit: int) -> list[object]:
        """At most `limit` values of an iterable."""
        if not is_iterable(value):
            raise TypeError(f"cannot unpack non-iterable {type(value).__name__} object")
        iterator = self.world.iterate(value)
        values: list[object] = []
        while len(values) < limit:
            try:
                values.append(self.world.advance(iterator))
            except StopIteration:
                break
        return values

    @opcode()
    def UNPACK_EX(self, argument: int) -> None:
        before, after = argument & 255, argument >> 8
        value = self.stack.pop()
        if not is_iterable(value):
            raise TypeError(f"cannot unpack non-iterable {type(value).__name__} object")
        iterator = self.world.iterate(value)
        values = self.consume(iterator)
        if len(values) < before + after:
            wanted = f"at least {before + after}"
            raise ValueError(f"not enough values to unpack (expected {wanted}, got {len(values)})")
        split = len(values) - after
        self.stack.extend(reversed((*values[:before], values[before:split], *values[split:])))

    # -- structural matching ----------------------------------------------------------------

    @opcode()
    def GET_LEN(self, _: int) -> None:
        self.stack.append(self.world.call(len, (self.stack[-1],), {}))

    @opcode()
    def MATCH_MAPPING(self, _: int) -> None:
        self.stack.append(bool(type(self.stack[-1]).__flags__ & _MAPPING_FLAG))

    @opcode()
    def MATCH_SEQUENCE(self, _: int) -> None:
        self.stack.append(bool(type(self.stack[-1]).__flags__ & _SEQUENCE_FLAG))

    @opcode()
    def MATCH_KEYS(self, _: int) -> None:
        subject, keys = self.stack[-2:]
        seen: set[object] = set()
        values = []
        get = self.world.getattr(subject, "get") if keys else None
        for key in keys:
            if key in seen:
                raise ValueError(f"mapping pattern checks duplicate key ({key!r})")
            seen.add(key)
            value = self.world.call(get, (key, MISSING), {})
            if value is MISSING:
                self.stack.append(None)
                return
            values.append(value)
        self.stack.append(tuple(values))

    @opcode()
    def MATCH_CLASS(self, count: int) -> None:
        subject, cls, names = self.pop_many(3)
        self.stack.append(self.match_class(subject, cls, count, names))

    def match_class(
        self, subject: object, cls: object, count: int, names: tuple[str, ...]
    ) -> tuple[object, ...] | None:
        """The attributes that a class pattern asks for, or None where it does not match."""
        if not isinstance(cls, type):
            raise TypeError("called match pattern must be a class")
        if not self.world.call(isinstance, (subject, cls), {}):
            return None
        values: list[object] = []
        seen: set[str] = set()
        positional: tuple[str, ...] = ()
        if count:
            found = self.world.call(getattr, (cls, "__match_args__", None), {})
            if found is None and issubclass(cls, _MATCH_SELF):
                if count > 1:
                    raise TypeError(f"{cls.__name__}() accepts 1 positional sub-pattern ({count} given)")
                values.append(subject)
            else:
                if found is not None and type(found) is not tuple:
                    kind = type(found).__name__
                    raise TypeError(f"{cls.__name__}.__match_args__ must be a tuple (got {kind})")
                positional = found or ()
                if count > len(positional):
                    plural = "" if len(positional) == 1 else "s"
                    given = f"accepts {len(positional)} positional sub-pattern{plural} ({count} given)"
                    raise TypeError(f"{cls.__name__}() {given}")
        for name in (*positional[:count], *names):
            if name in seen:
                raise TypeError(f"{cls.__name__}() got multiple sub-patterns for attribute '{name}'")
            seen.add(name)
            value = self.world.call(getattr, (subject, name, MISSING), {})
            if value is MISSING:
                return None
            values.append(value)
        return tuple(values)

    # -- intrinsics -------------------------------------------------------------------------

    @opcode(since=(3, 12))
    def CALL_INTRINSIC_1(self, which: int) -> None:
        name = dis._intrinsic_1_descs[which]  # type: ignore[attr-defined]
        value = self.stack.pop()
        if name == "INTRINSIC_STOPITERATION_ERROR":
            if isinstance(value, StopIteration):
                error = RuntimeError("generator raised StopIteration")
                error.__cause__ = error.__context__ = value
                value = error
        elif name == "INTRINSIC_UNARY_POSITIVE":
            value = self.world.unary("+", value)
        elif name == "INTRINSIC_LIST_TO_TUPLE":
            value = tuple(value)
        elif name in _OF_TYPES:
            value = _native_intrinsic("CALL_INTRINSIC_1", which)(value)
        else:
            self.world.unsupported("opcode", f"CALL_INTRINSIC_1 {name}")
        self.stack.append(value)

    @opcode(since=(3, 12))
    def CALL_INTRINSIC_2(self, which: int) -> None:
        name = dis._intrinsic_2_descs[which]  # type: ignore[attr-defined]
        first, second = self.pop_many(2)
        if name == "INTRINSIC_SET_FUNCTION_TYPE_PARAMS":
            first.__type_params__ = second
        elif name == "INTRINSIC_PREP_RERAISE_STAR":
            first = after_clauses(first, second, self.interpreter.raised_groups)
        elif name in _OF_TYPES:
            first = _native_intrinsic("CALL_INTRINSIC_2", which)(first, second)
        else:
            self.world.unsupported("opcode", f"CALL_INTRINSIC_2 {name}")
        self.stack.append(first)


# What statements of generic functions, classes and type aliases make. What they compute, they compute when asked.
_OF_TYPES = frozenset(
    {
        *("INTRINSIC_TYPEVAR", "INTRINSIC_PARAMSPEC", "INTRINSIC_TYPEVARTUPLE", "INTRINSIC_SUBSCRIPT_GENERIC"),
        *("INTRINSIC_TYPEALIAS", "INTRINSIC_TYPEVAR_WITH_BOUND", "INTRINSIC_TYPEVAR_WITH_CONSTRAINTS"),
        "INTRINSIC_SET_TYPEPARAM_DEFAULT",
    }
)


@functools.cache
def _native_intrinsic(instruction: str, which: int) -> Callable[..., object]:
    """A function of the instruction's operands that runs it: Python has no name for what an intrinsic does."""
    code = (lambda a: a).__code__ if instruction == "CALL_INTRINSIC_1" else (lambda a, b: a).__code__
    loads = (("LOAD_FAST", index) for index in range(code.co_argcount))
    body = (("RESUME", 0), *loads, (instruction, which), ("RETURN_VALUE", 0))
    text = bytes(byte for name, argument in body for byte in (dis.opmap[name], argument))
    return types.FunctionType(code.replace(co_code=text, co_stacksize=2), {"__builtins__": builtins})


def _callee_name(stack: list[object], depth: int) -> str:
    callee = next((v for v in reversed(stack[: len(stack) - depth]) if callable(v)), None)
    name = getattr(callee, "__qualname__", None)
    if name is None:
        return f"{type(callee).__name__} object"
    module = getattr(callee, "__module__", None)
    return f"{module}.{name}()" if module not in (None, "builtins") else f"{name}()"
