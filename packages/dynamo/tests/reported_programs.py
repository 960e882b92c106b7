"""Programs after public reports of wrong results of compiled code, written anew from what the reports describe.

Each builds a small world and returns a program, the calls to make (each changes the world as it likes and gives the
arguments) and what to watch besides results and arguments. `test_dynamo_programs.py` runs each world twice, eagerly and
compiled, and compares values, order, layout, and which objects and memories are one.
"""

# ruff: noqa: PLW0602, PLW0603, B006, B023, B904

from __future__ import annotations

import collections
import contextlib
import contextvars
import dataclasses
import enum
import random
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Case = tuple[Callable[..., Any], list[Callable[[], tuple[Any, ...]]], Any]


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(*shape or (3,))


def again(times: int = 3) -> list[Callable[[], tuple[Any, ...]]]:
    return [lambda: (ones(),)] * times


# -- writes to the outside ----------------------------------------------------------------------


def list_of_a_class_is_appended_to() -> Case:
    class Model(nn.Module):
        items: list[Any] = []

        def forward(self, x: Any) -> Any:
            Model.items.append(x)
            self.items.append(len(self.items))
            return x + len(Model.items)

    return Model(), again(), Model.items


def an_ordered_dict_is_reordered() -> Case:
    cache = collections.OrderedDict(a=1, b=2, c=3)

    def program(x: Any) -> Any:
        cache.move_to_end("a")
        cache.move_to_end("c", last=False)
        oldest = next(iter(cache))
        cache[f"new{len(cache)}"] = cache.pop(oldest)
        return x * len(cache)

    return program, again(), cache


def a_method_of_a_local_class_writes_to_a_closure() -> Case:
    counts, log = {"n": 0}, []

    def program(x: Any) -> Any:
        class Helper:
            def touch(self, value: Any) -> None:
                counts["n"] += 1
                log.append(value.shape)

        helper = Helper()
        helper.touch(x)
        helper.touch(x[1:])
        return x + counts["n"]

    return program, again(), (counts, log)


def a_list_grows_while_a_generator_walks_it() -> Case:
    def program(x: Any) -> Any:
        values = [x.sum()]

        def walk() -> Any:
            for item in values:
                if len(values) < 4:
                    values.append(item + 1)
                yield item

        return torch.stack(list(walk())).sum(), len(values)

    return program, again(), None


def a_global_is_rebound_in_a_loop() -> Case:
    @dataclasses.dataclass
    class Region:
        hidden: Any

    box = {"region": Region(ones())}

    def region() -> Any:
        return box["region"].hidden + 1

    def program(x: Any) -> Any:
        for _ in range(3):
            box["region"] = Region(x)
            x = region()
        return x

    return program, again(), box


def a_key_is_deleted_and_comes_back() -> Case:
    table = {"a": 1, "b": 2, "c": 3}

    def program(x: Any) -> Any:
        value = table.pop("a")
        table["d"] = 4
        table["a"] = value
        del table["d"]
        return x + list(table.values())[0], list(table)

    return program, again(), table


def equal_keys_of_other_types() -> Case:
    table: dict[Any, Any] = {1: "one", "k": 2}

    def program(x: Any) -> Any:
        del table[1]
        table[True] = "true"
        table[1.0] = "kept key, new value"
        return x, [type(key).__name__ for key in table]

    return program, [lambda: (table.clear(), table.update({1: "one", "k": 2}), (ones(),))[2]] * 3, table


def a_default_argument_collects() -> Case:
    def collect(value: Any, into: list[Any] = [], *, seen: dict[str, int] = {}) -> int:
        into.append(value)
        seen["n"] = seen.get("n", 0) + 1
        return len(into) + seen["n"]

    return lambda x: x + collect(x) * collect(x + 1), again(), (collect.__defaults__, collect.__kwdefaults__)


def two_closures_share_a_cell() -> Case:
    def make() -> Any:
        count = 0

        def up() -> int:
            nonlocal count
            count += 1
            return count

        def show() -> int:
            return count

        return up, show

    up, show = make()

    def program(x: Any) -> Any:
        x = x + up()
        print(end="")
        return x * up() + show()

    return program, again(), show


def augmented_assignment_keeps_the_list() -> Case:
    values = [1]
    box = {"values": values}

    def program(x: Any) -> Any:
        mine = box["values"]
        mine += [len(mine)]
        box["values"] = box["values"] + [9]
        return x + len(mine), mine is values, box["values"] is values

    return program, again(), (values, box)


def a_missing_key_makes_its_value() -> Case:
    groups: Any = collections.defaultdict(list)

    def program(x: Any) -> Any:
        groups["a"].append(1)
        known = "b" in groups, groups.get("b")
        return x + len(groups["b"]), known

    return program, [*again(2), lambda: (groups.clear(), (ones(),))[1]], groups


def a_queue_forgets_its_oldest() -> Case:
    history: Any = collections.deque([0], maxlen=3)

    def program(x: Any) -> Any:
        history.append(float(len(history)))
        history.rotate(1)
        return x + sum(history)

    return program, again(5), history


def attributes_come_and_go() -> Case:
    class Box:
        size = 7

    box = Box()

    def program(x: Any) -> Any:
        had = hasattr(box, "late")
        box.late = box.size
        del box.late
        box.size = box.size + 1
        found = box.size
        del box.size
        return x + found + box.size, had

    def with_late() -> tuple[Any, ...]:
        box.late = 1
        return (ones(),)

    return program, [*again(2), with_late, *again(1)], box


def a_setter_of_the_class_notes_its_writes() -> Case:
    log: list[Any] = []

    class Noted:
        def __setattr__(self, name: str, value: Any) -> None:
            log.append((name, getattr(self, name, None)))
            super().__setattr__(name, value)

    noted = Noted()

    def program(x: Any) -> Any:
        noted.a = 1
        print(end="")
        noted.b = noted.a + 1
        noted.a = noted.b
        return x * noted.a

    return program, again(), (log, noted)


def a_property_counts_its_reads() -> Case:
    class Counter:
        reads = 0

        @property
        def value(self) -> int:
            self.reads += 1
            return self.reads

    counter = Counter()
    return lambda x: x * counter.value + counter.value, again(), counter


def attributes_are_made_at_their_first_read() -> Case:
    class Lazy:
        def __getattr__(self, name: str) -> Any:
            if name.startswith("_"):
                raise AttributeError(name)
            value = self.__dict__[name] = len(self.__dict__) + 1
            return value

    lazy = Lazy()
    return lambda x: x * lazy.first + lazy.second, again(), lazy


def keyword_arguments_do_not_leak() -> Case:
    options = {"scale": 2}
    values = [1, 2]

    def helper(*args: int, **kwargs: int) -> int:
        kwargs["scale"] += 1
        kwargs["more"] = 1
        return sum(args) * kwargs["scale"]

    return lambda x: x * helper(*values, **options), again(), (options, values)


def a_function_counts_its_calls() -> Case:
    def counted(x: Any) -> Any:
        counted.calls = getattr(counted, "calls", 0) + 1  # type: ignore[attr-defined]
        return x * counted.calls  # type: ignore[attr-defined]

    return lambda x: counted(counted(x)), again(), counted


def a_context_variable_is_set() -> Case:
    level: contextvars.ContextVar[int] = contextvars.ContextVar("level", default=1)

    def program(x: Any) -> Any:
        token = level.set(level.get() + 1)
        try:
            return x * level.get()
        finally:
            level.reset(token)

    def deeper() -> tuple[Any, ...]:
        level.set(5)
        return (ones(),)

    return program, [*again(2), deeper], None


# -- what is read, and changes between calls ----------------------------------------------------


def a_buffer_is_replaced() -> Case:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cache = torch.tensor([0, 0])

        def forward(self, x: Any, position: Any) -> Any:
            self.cache[position] = x
            return self.cache

    model = Model()

    def replaced() -> tuple[Any, ...]:
        model.cache = torch.tensor([0, 0])
        return torch.tensor([1]), torch.tensor([1])

    return model, [lambda: (torch.tensor([2]), torch.tensor([0])), replaced, replaced], None


def the_code_of_a_method_is_replaced() -> Case:
    class Model:
        def scale(self, x: Any) -> Any:
            return x * 2

        @classmethod
        def shift(cls, x: Any) -> Any:
            return x + 1

    def nine(self: Any, x: Any) -> Any:
        return x * 9

    model = Model()

    def replace_method() -> tuple[Any, ...]:
        Model.scale.__code__ = nine.__code__
        return (ones(),)

    def replace_class_method() -> tuple[Any, ...]:
        Model.__dict__["shift"].__func__.__code__ = nine.__code__
        return (ones(),)

    return lambda x: model.shift(model.scale(x)), [*again(2), replace_method, replace_class_method], None


def functions_differ_in_their_defaults() -> Case:
    def make(offset: int) -> Any:
        def shift(x: Any, by: int = offset) -> Any:
            return x + by

        return shift

    return lambda f, x: f(x), [lambda n=n: (make(n), ones()) for n in (1, 2, 1, 5)], None


def a_global_function_is_rebound() -> Case:
    functions = {"f": torch.sin}

    def rebound() -> tuple[Any, ...]:
        functions["f"] = lambda x: torch.cos(x) * 3
        return (ones(),)

    return lambda x: functions["f"](x), [*again(2), rebound, *again(1)], None


def a_branch_on_the_identity_of_an_object() -> Case:
    class Token:
        def __init__(self) -> None:
            self.uses = 0

    tokens = [Token(), Token()]
    current = {"token": tokens[0]}

    def program(x: Any) -> Any:
        token = current["token"]
        token.uses += 1
        return x * 2 if token is tokens[0] else x * 3

    def other() -> tuple[Any, ...]:
        current["token"] = tokens[1]
        return (ones(),)

    return program, [*again(2), other, *again(1)], tokens


def the_class_of_an_object_changes() -> Case:
    class First:
        def act(self, x: Any) -> Any:
            return x + 1

    class Second(First):
        def act(self, x: Any) -> Any:
            return super().act(x) * 10

    obj = First()

    def second() -> tuple[Any, ...]:
        obj.__class__ = Second
        return (ones(),)

    def program(x: Any) -> Any:
        return obj.act(x), type(obj).__name__, isinstance(obj, Second)

    return program, [*again(2), second, *again(1)], None


def an_object_dies() -> Case:
    class Thing:
        size = 2

    things = [Thing()]
    reference = weakref.ref(things[0])

    def program(x: Any) -> Any:
        thing = reference()
        return x if thing is None else x * thing.size

    def dropped() -> tuple[Any, ...]:
        things.clear()
        return (ones(),)

    return program, [*again(2), dropped, *again(1)], None


def a_generator_is_used_up() -> Case:
    numbers = iter([1, 2, 3, 4, 5])
    squares = (n * n for n in numbers)

    def program(x: Any) -> Any:
        return x + next(squares) * 10 + next(squares)

    return program, again(2), numbers


def an_iterator_is_left_where_the_loop_left_it() -> Case:
    numbers = iter(range(20))

    def program(x: Any) -> Any:
        for number, letter in zip(numbers, "abc", strict=False):
            x = x + number
            print(end="")
            if letter == "b":
                break
        return x

    return program, again(), numbers


def hooks_come_and_go() -> Case:
    net = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    with torch.no_grad():
        net[0].weight.fill_(1.0)
        net[0].bias.fill_(0.5)
    seen: list[Any] = []
    handles: list[Any] = []

    def added() -> tuple[Any, ...]:
        handles.append(net[0].register_forward_hook(lambda m, args, out: seen.append(out.shape) or out * 2))
        return (ones(2, 3),)

    def first_added() -> tuple[Any, ...]:
        handles.append(net.register_forward_pre_hook(lambda m, args: (args[0] - 1,), prepend=True))
        return (ones(2, 3),)

    def removed() -> tuple[Any, ...]:
        handles.pop(0).remove()
        return (ones(2, 3),)

    return net, [lambda: (ones(2, 3),), added, first_added, removed, removed], seen


def one_of_an_enum() -> Case:
    class Mode(enum.IntFlag):
        FAST = 1
        EXACT = 2

    state = {"mode": Mode.FAST, Mode.FAST: 5, Mode.EXACT: 7}

    def both() -> tuple[Any, ...]:
        state["mode"] = Mode.FAST | Mode.EXACT
        return (ones(),)

    def program(x: Any) -> Any:
        mode = state["mode"]
        return x * (state[Mode.FAST] if Mode.FAST in mode else 0) + (state[Mode.EXACT] if Mode.EXACT & mode else 0)

    return program, [*again(2), both], None


def members_of_a_set_in_order() -> Case:
    members = {1, 2, 3}

    def program(x: Any) -> Any:
        members.add(12)
        members.discard(2)
        for member in members:
            x = x * 2 + member
        return x, sorted(members)

    def more() -> tuple[Any, ...]:
        members.add(4)
        return (ones(),)

    return program, [*again(2), more], None


def a_changing_number_is_a_key_in_a_handled_block() -> Case:
    seen: set[int] = {1, 2}

    def program(x: Any, n: int) -> Any:
        try:
            seen.symmetric_difference_update({n})
            table = {n: 1, n + 1: 2}
        except Exception as error:
            return repr(error)
        return x * n, sorted(seen), table

    return program, [lambda n=n: (ones(), n) for n in (0, 1, 2, 3, 9)], seen


def gradients_are_switched_off_for_good() -> Case:
    weight = nn.Parameter(ones())

    def program(x: Any) -> Any:
        before = (x * weight).requires_grad
        torch.set_grad_enabled(False)
        inside = (x * weight).requires_grad
        print(end="")
        torch.set_grad_enabled(True)
        return before, inside, x * weight

    return program, again(), None


def a_tensor_starts_to_need_gradients() -> Case:
    weight = ones()

    def needed() -> tuple[Any, ...]:
        weight.requires_grad_(True)
        return (ones(),)

    return lambda x: (x * weight).requires_grad, [*again(2), needed], None


def random_numbers_of_two_kinds() -> Case:
    def program(x: Any) -> Any:
        if random.random() < 0.5:
            x = x + torch.rand(3)
        order = [1, 2, 3, 4]
        random.shuffle(order)
        print(end="")
        return x * torch.randn(3), order, random.randint(0, 9)

    def seeded() -> tuple[Any, ...]:
        random.seed(4)
        torch.manual_seed(4)
        return (ones(),)

    return program, [seeded, *again(4), seeded], None


def a_tensor_carries_an_attribute() -> Case:
    def program(x: Any) -> Any:
        scale = getattr(x, "scale", 1)
        x.scale = scale + 1
        y = x * scale
        y.origin = "made"
        return y, y.origin, x.scale

    def tagged() -> tuple[Any, ...]:
        x = ones()
        x.scale = 5  # type: ignore[attr-defined]
        return (x,)

    return program, [*again(2), tagged], None


# -- exceptions and regions ---------------------------------------------------------------------


def a_region_sees_the_exception() -> Case:
    log: list[Any] = []

    class Region:
        def __init__(self, name: str, swallow: bool = False) -> None:
            self.name, self.swallow = name, swallow

        def __enter__(self) -> None:
            log.append(("enter", self.name))

        def __exit__(self, kind: Any, *rest: Any) -> bool:
            log.append(("exit", self.name, kind and kind.__name__))
            return self.swallow

    def program(x: Any) -> Any:
        with Region("outer", True), Region("inner"):
            x = x + 1
            print(end="")
            log.append("before")
            raise KeyError("gone")
        log.append("after")
        return x * 2

    return program, again(), log


def finally_wins_over_return() -> Case:
    log: list[Any] = []

    def choose(x: Any, n: int) -> Any:
        for i in range(3):
            try:
                if i == n:
                    return x * i
                log.append(i)
            finally:
                log.append("finally")
                if i == 1:
                    return x * 100  # noqa: B012
        return x

    return lambda x: (choose(x, 0), choose(x, 1), choose(x, 2)), again(), log


def a_dict_changes_while_it_is_walked() -> Case:
    table = {"a": 1, "b": 2}

    def program(x: Any) -> Any:
        try:
            for key in table:
                table[key + key] = 1
        except RuntimeError as error:
            return x + len(table), str(error)
        return x

    return program, again(), table


def notes_and_causes_of_an_exception() -> Case:
    def program(x: Any, state: list[Any]) -> Any:
        state.append("before")
        try:
            try:
                raise ValueError("first")
            except ValueError as error:
                error.add_note("a note")
                raise LookupError("second") from error
        finally:
            state.append(x.sum())

    return program, [lambda: (ones(), [])] * 3, None


def a_generator_is_closed_early() -> Case:
    log: list[Any] = []

    @contextlib.contextmanager
    def region() -> Any:
        log.append("in")
        try:
            yield 3
        finally:
            log.append("out")

    def program(x: Any) -> Any:
        with region() as value:
            print(end="")
            if x.sum() > 0:
                return x * value
        return x

    return program, again(), log


# -- tensors that share memory ------------------------------------------------------------------


def inputs_begin_to_share_memory() -> Case:
    def program(x: Any, y: Any) -> Any:
        x.mul_(2)
        return x + y

    base = torch.ones(8)
    both = ones(4)
    calls = [lambda: (ones(4), ones(4)), lambda: (base[:4], base[2:6]), lambda: (both, both), lambda: (ones(4), both)]
    return program, calls, (base, both)


def dropout_hands_back_its_input() -> Case:
    def program(x: Any) -> Any:
        y = nn.functional.dropout(x, 0.5, training=False)
        y += y
        return y, y is x

    return program, again(), None


def a_parameter_made_of_a_result() -> Case:
    def program(x: Any) -> Any:
        y = x + 1
        z = nn.Parameter(y)
        with torch.no_grad():
            z.mul_(2)
        return y + z

    return program, again(), None


def data_is_assigned_and_emptied() -> Case:
    def program(x: Any, y: Any) -> Any:
        x.data = y
        y.data = torch.zeros(0)
        return x

    return program, [lambda: (torch.zeros(3), ones())] * 3, None


def a_view_is_resized() -> Case:
    def program(x: Any) -> Any:
        base = x + 1
        alias = base.view(-1)
        alias.resize_(2)
        alias.zero_()
        return base + 1, alias

    return program, again(), None


def storage_is_set() -> Case:
    def program(x: Any) -> Any:
        y = torch.zeros(3)
        y.set_(x[1:])
        y.add_(5)
        return y, y.shape

    return program, again(), None


def windows_with_gaps_are_written() -> Case:
    def program(x: Any) -> Any:
        windows = x.unfold(0, 2, 3)
        windows.mul_(10)
        return windows

    return program, [lambda: (torch.arange(9.0),)] * 2 + [lambda: (torch.arange(12.0)[::2],)], None


def windows_are_asked_for_by_name() -> Case:
    def program(x: Any) -> Any:
        windows = x.unfold(step=3, size=2, dimension=0)
        windows.mul_(10)
        return windows

    return program, [lambda: (torch.arange(9.0),)] * 2, None


def number_then_arithmetic_in_place() -> Case:
    def program(x: Any) -> Any:
        value = x[0].item()
        x += value
        x *= x[1].item()
        return value, x.sum().item(), x - value

    return program, [lambda n=n: (torch.arange(3.0) + n,) for n in (1, 2, 3)], None


def a_view_is_written_without_gradients() -> Case:
    weight = nn.Parameter(torch.arange(6.0).reshape(2, 3))

    def program(x: Any) -> Any:
        with torch.no_grad():
            weight[0].copy_(x)
            weight.t()[1].add_(1)
        return weight * 2

    return program, again(), weight


def strided_over_a_copy() -> Case:
    def program(x: Any) -> Any:
        y = x.clone()
        z = y.as_strided((2, 2), (2, 1), 1)
        z.add_(1)
        return y, z

    return program, [lambda: (torch.arange(6.0),)] * 3, None


def strided_over_a_diagonal() -> Case:
    def program(x: Any) -> Any:
        x.diagonal().as_strided((2,), (1,), 0).add_(1)
        return x

    return program, [lambda: (torch.zeros(2, 4),)] * 3, None


def an_expanded_tensor_is_written() -> Case:
    def program(x: Any) -> Any:
        wide = x[0].expand(4)
        before = wide.clone()
        x[0] = 9
        return before, wide, wide.stride()

    return program, again(), None


def rows_are_swapped() -> Case:
    def program(x: Any) -> Any:
        x[0], x[1] = x[1].clone(), x[0].clone()
        x[[0, 2]] = x[[2, 0]]
        return x

    return program, [lambda: (torch.arange(6.0).reshape(3, 2),)] * 3, None


def a_subclass_of_tensor_is_given() -> Case:
    class Tagged(torch.Tensor):
        calls = 0

        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            Tagged.calls += 1
            return super().__torch_function__(func, types, args, kwargs or {})

    def program(x: Any) -> Any:
        return x * 2 + 1

    calls = [lambda: (ones(),), lambda: (ones().as_subclass(Tagged),), lambda: (ones(),)]
    return program, calls, None


def layouts_change_between_calls() -> Case:
    def program(x: Any) -> Any:
        y = x * 2
        return y, y.stride(), x.reshape(-1)[0:2], x.is_contiguous()

    grid = torch.arange(12.0).reshape(3, 4)
    calls = [lambda: (grid,), lambda: (grid.t(),), lambda: (grid[:, ::2],), lambda: (grid[1:],)]
    return program, calls, None


def one_list_under_two_names() -> Case:
    def program(a: Any, b: Any) -> Any:
        a.append(a[0] * 2)
        return len(b), b[-1]

    def same() -> tuple[Any, ...]:
        values = [ones()]
        return values, values

    return program, [lambda: ([ones()], [ones() * 3]), same, lambda: ([ones()], [ones() * 3]), same], None


def tensors_are_looked_for_in_a_list() -> Case:
    def program(x: Any) -> Any:
        y = x + 1
        values = [y, x, y]
        values.remove(y)
        return [v is y for v in values], any(v is x for v in values), values

    return program, [lambda: (torch.ones(1),)] * 3, None


REPORTED = [
    list_of_a_class_is_appended_to, an_ordered_dict_is_reordered, a_method_of_a_local_class_writes_to_a_closure,
    a_list_grows_while_a_generator_walks_it, a_global_is_rebound_in_a_loop, a_key_is_deleted_and_comes_back,
    equal_keys_of_other_types, a_default_argument_collects, two_closures_share_a_cell,
    augmented_assignment_keeps_the_list, a_missing_key_makes_its_value, a_queue_forgets_its_oldest,
    attributes_come_and_go, a_setter_of_the_class_notes_its_writes, a_property_counts_its_reads,
    attributes_are_made_at_their_first_read, keyword_arguments_do_not_leak, a_function_counts_its_calls,
    a_context_variable_is_set, a_buffer_is_replaced, the_code_of_a_method_is_replaced,
    functions_differ_in_their_defaults, a_global_function_is_rebound, a_branch_on_the_identity_of_an_object,
    the_class_of_an_object_changes, an_object_dies, a_generator_is_used_up, an_iterator_is_left_where_the_loop_left_it,
    hooks_come_and_go, one_of_an_enum, members_of_a_set_in_order, a_changing_number_is_a_key_in_a_handled_block,
    gradients_are_switched_off_for_good, a_tensor_starts_to_need_gradients, random_numbers_of_two_kinds,
    a_tensor_carries_an_attribute, a_region_sees_the_exception, finally_wins_over_return,
    a_dict_changes_while_it_is_walked, notes_and_causes_of_an_exception, a_generator_is_closed_early,
    inputs_begin_to_share_memory, dropout_hands_back_its_input, a_parameter_made_of_a_result,
    data_is_assigned_and_emptied, a_view_is_resized, storage_is_set, windows_with_gaps_are_written,
    windows_are_asked_for_by_name,
    number_then_arithmetic_in_place, a_view_is_written_without_gradients, strided_over_a_copy, strided_over_a_diagonal,
    an_expanded_tensor_is_written, rows_are_swapped, a_subclass_of_tensor_is_given, layouts_change_between_calls,
    one_list_under_two_names, tensors_are_looked_for_in_a_list,
]  # fmt: skip
