"""Instructions that read and write names, cells, attributes and items, and shuffle the stack."""

from __future__ import annotations

import types

from torchdynamo.interpreter.protocol import MISSING, NULL
from torchdynamo.interpreter.state import CLOSED, FrameState, opcode


class LoadStoreOpcodes(FrameState):
    """Names, attributes, items, and the stack."""

    __slots__ = ()

    # -- local variables --------------------------------------------------------------------

    @opcode("LOAD_FAST", "LOAD_FAST_CHECK")
    def LOAD_FAST(self, slot: int) -> None:
        value = self.fast[slot]
        if value is NULL:
            raise self.unbound_local(slot)
        self.stack.append(value)

    def unbound_local(self, slot: int) -> UnboundLocalError:
        """The error for a local variable that has no value."""
        name = self.decoded.local_names[slot]
        return UnboundLocalError(f"cannot access local variable '{name}' where it is not associated with a value")

    @opcode(until=(3, 12))
    def LOAD_CLOSURE(self, slot: int) -> None:
        self.stack.append(self.fast[slot])

    @opcode(since=(3, 12))
    def LOAD_FAST_AND_CLEAR(self, slot: int) -> None:
        self.stack.append(self.fast[slot])
        self.fast[slot] = NULL

    @opcode()
    def STORE_FAST(self, slot: int) -> None:
        if type(self.fast[slot]) in CLOSED:
            self.let_go((self.fast[slot],))
        self.fast[slot] = self.stack.pop()

    @opcode(since=(3, 12))
    def STORE_FAST_MAYBE_NULL(self, slot: int) -> None:
        self.fast[slot] = self.stack.pop()

    @opcode()
    def DELETE_FAST(self, slot: int) -> None:
        if self.fast[slot] is NULL:
            raise self.unbound_local(slot)
        self.let_go((self.fast[slot],))
        self.fast[slot] = NULL

    @opcode(since=(3, 13))
    def LOAD_FAST_LOAD_FAST(self, slots: int) -> None:
        for slot in (slots >> 4, slots & 15):
            if self.fast[slot] is NULL:
                raise self.unbound_local(slot)
            self.stack.append(self.fast[slot])

    @opcode(since=(3, 13))
    def STORE_FAST_LOAD_FAST(self, slots: int) -> None:
        self.let_go((self.fast[slots >> 4],))
        self.fast[slots >> 4] = self.stack[-1]
        self.stack[-1] = self.fast[slots & 15]

    @opcode(since=(3, 13))
    def STORE_FAST_STORE_FAST(self, slots: int) -> None:
        self.let_go((self.fast[slots >> 4], self.fast[slots & 15]))
        self.fast[slots >> 4] = self.stack.pop()
        self.fast[slots & 15] = self.stack.pop()

    @opcode()
    def LOAD_CONST(self, value: object) -> None:
        self.stack.append(value)

    # -- cells ------------------------------------------------------------------------------

    @opcode()
    def MAKE_CELL(self, slot: int) -> None:
        value = self.fast[slot]
        self.fast[slot] = self.world.make_cell(types.CellType() if value is NULL else types.CellType(value))

    @opcode()
    def COPY_FREE_VARS(self, count: int) -> None:
        closure = self.function.__closure__ or ()
        self.fast[len(self.fast) - count :] = closure

    @opcode()
    def LOAD_DEREF(self, slot: int) -> None:
        value = self.world.load_cell(self.fast[slot])
        if value is MISSING:
            raise self.unbound_cell(slot)
        self.stack.append(value)

    def unbound_cell(self, slot: int) -> NameError:
        """The error for a variable in a cell that has no value."""
        name = self.decoded.local_names[slot]
        if name in self.function.__code__.co_freevars:
            return NameError(
                f"cannot access free variable '{name}' where it is not associated with a value in enclosing scope",
                name=name,
            )
        return UnboundLocalError(f"cannot access local variable '{name}' where it is not associated with a value")

    @opcode("LOAD_CLASSDEREF", until=(3, 11))
    def LOAD_CLASSDEREF(self, slot: int) -> None:
        name = self.decoded.local_names[slot]
        if name in self.names:
            self.stack.append(self.names[name])
        else:
            self.LOAD_DEREF(slot)

    @opcode(since=(3, 12))
    def LOAD_FROM_DICT_OR_DEREF(self, slot: int) -> None:
        mapping, name = self.stack.pop(), self.decoded.local_names[slot]
        if name in mapping:
            self.stack.append(mapping[name])
        else:
            self.LOAD_DEREF(slot)

    @opcode()
    def STORE_DEREF(self, slot: int) -> None:
        self.world.store_cell(self.fast[slot], self.stack.pop())

    @opcode()
    def DELETE_DEREF(self, slot: int) -> None:
        if self.world.load_cell(self.fast[slot]) is MISSING:
            raise self.unbound_cell(slot)
        self.world.delete_cell(self.fast[slot])

    # -- names ------------------------------------------------------------------------------

    @opcode("LOAD_GLOBAL", until=(3, 12))
    def LOAD_GLOBAL(self, operand: tuple[str, int]) -> None:
        name, push_null = operand
        if push_null:
            self.stack.append(NULL)
        self.stack.append(self.world.load_global(self.function, name))

    @opcode("LOAD_GLOBAL", since=(3, 13))
    def LOAD_GLOBAL_then_null(self, operand: tuple[str, int]) -> None:
        name, push_null = operand
        self.stack.append(self.world.load_global(self.function, name))
        if push_null:
            self.stack.append(NULL)

    @opcode()
    def STORE_GLOBAL(self, name: str) -> None:
        self.world.store_global(self.function, name, self.stack.pop())

    @opcode()
    def DELETE_GLOBAL(self, name: str) -> None:
        self.world.delete_global(self.function, name)

    @opcode()
    def LOAD_NAME(self, name: str) -> None:
        try:
            value = self.names[name]
        except KeyError:
            value = self.world.load_global(self.function, name)
        self.stack.append(value)

    @opcode(since=(3, 12))
    def LOAD_FROM_DICT_OR_GLOBALS(self, name: str) -> None:
        mapping = self.stack.pop()
        self.stack.append(mapping[name] if name in mapping else self.world.load_global(self.function, name))

    @opcode(since=(3, 12))
    def LOAD_LOCALS(self, _: int) -> None:
        self.stack.append(self.names)

    @opcode()
    def STORE_NAME(self, name: str) -> None:
        self.names[name] = self.stack.pop()

    @opcode()
    def DELETE_NAME(self, name: str) -> None:
        if name not in self.names:
            raise NameError(f"name '{name}' is not defined", name=name)
        del self.names[name]

    @opcode()
    def SETUP_ANNOTATIONS(self, _: int) -> None:
        if "__annotations__" not in self.names:
            self.names["__annotations__"] = {}

    # -- attributes and items ---------------------------------------------------------------

    @opcode("LOAD_ATTR", until=(3, 11))
    def LOAD_ATTR(self, name: str) -> None:
        self.stack[-1] = self.world.getattr(self.stack[-1], name)

    @opcode(until=(3, 11))
    def LOAD_METHOD(self, name: str) -> None:
        self.stack.append(self.world.getattr(self.stack[-1], name))
        self.stack[-2] = NULL

    @opcode("LOAD_ATTR", since=(3, 12), until=(3, 12))
    def LOAD_ATTR_or_method(self, operand: tuple[str, int]) -> None:
        name, method = operand
        value = self.world.getattr(self.stack.pop(), name)
        if method:
            self.stack.append(NULL)
        self.stack.append(value)

    @opcode("LOAD_ATTR", since=(3, 13))
    def LOAD_ATTR_then_null(self, operand: tuple[str, int]) -> None:
        name, method = operand
        self.stack[-1] = self.world.getattr(self.stack[-1], name)
        if method:
            self.stack.append(NULL)

    @opcode("LOAD_SUPER_ATTR", since=(3, 12), until=(3, 12))
    def LOAD_SUPER_ATTR(self, operand: tuple[str, int, int]) -> None:
        value = self._super_value(operand)
        if operand[1]:
            self.stack.append(NULL)
        self.stack.append(value)

    @opcode("LOAD_SUPER_ATTR", since=(3, 13))
    def LOAD_SUPER_ATTR_then_null(self, operand: tuple[str, int, int]) -> None:
        self.stack.append(self._super_value(operand))
        if operand[1]:
            self.stack.append(NULL)

    def _super_value(self, operand: tuple[str, int, int]) -> object:
        """The stack holds what the name `super` means here, the class and the first argument."""
        callee, cls, first = self.pop_many(3)
        if callee is super:
            proxy = self.world.make_super(cls, first)
        else:
            proxy = self.world.call(callee, (cls, first) if operand[2] else (), {})
        return self.world.getattr(proxy, operand[0])

    @opcode()
    def STORE_ATTR(self, name: str) -> None:
        owner = self.stack.pop()
        self.world.setattr(owner, name, self.stack.pop())

    @opcode()
    def DELETE_ATTR(self, name: str) -> None:
        self.world.delattr(self.stack.pop(), name)

    @opcode()
    def BINARY_SUBSCR(self, _: int) -> None:
        key = self.stack.pop()
        self.stack[-1] = self.world.getitem(self.stack[-1], key)

    @opcode()
    def STORE_SUBSCR(self, _: int) -> None:
        value, owner, key = self.pop_many(3)
        self.world.setitem(owner, key, value)

    @opcode()
    def DELETE_SUBSCR(self, _: int) -> None:
        owner, key = self.pop_many(2)
        self.world.delitem(owner, key)

    @opcode(since=(3, 12))
    def BINARY_SLICE(self, _: int) -> None:
        owner, start, stop = self.pop_many(3)
        self.stack.append(self.world.getitem(owner, slice(start, stop)))

    @opcode(since=(3, 12))
    def STORE_SLICE(self, _: int) -> None:
        value, owner, start, stop = self.pop_many(4)
        self.world.setitem(owner, slice(start, stop), value)

    # -- the stack --------------------------------------------------------------------------

    @opcode()
    def POP_TOP(self, _: int) -> None:
        if type(self.stack[-1]) in CLOSED:
            self.let_go((self.stack[-1],))
        self.stack.pop()

    @opcode()
    def PUSH_NULL(self, _: int) -> None:
        self.stack.append(NULL)

    @opcode()
    def COPY(self, depth: int) -> None:
        self.stack.append(self.stack[-depth])

    @opcode()
    def SWAP(self, depth: int) -> None:
        stack = self.stack
        stack[-1], stack[-depth] = stack[-depth], stack[-1]

    @opcode("NOP", "RESUME", "PRECALL")
    def NOP(self, _: int) -> None:
        pass
