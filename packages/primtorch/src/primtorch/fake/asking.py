"""What eager refuses for its dtypes: the operator itself is asked, on a few elements, once for each combination.

Which dtypes an operator takes, and with which others, is written in its kernels alone; it depends on the release, the
layout and the number of dims, and its text is the kernel's. A formula gives shapes for all of them. So, where a formula
has taken a call, the kernel is called as well: with the call's own arguments, but tensors of as few elements as the
formula takes. A refusal counts where the same call with other dtypes is taken: then it is neither the sizes, which are
not the program's, nor the elements, which are made up. What a formula refuses is put to the kernel in the same way.
What cannot be asked stays as the formula has it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch._C import DispatchKey, DispatchKeySet
from torch._ops import OpOverload

from primtorch import forks
from primtorch.arguments import TENSORS
from primtorch.errors import NoFormula, PrimError, PrimTorchError
from primtorch.fake.recipe import storage_bytes
from primtorch.fake.table import Rule, RuleTable, is_composite
from primtorch.families import Formula
from primtorch.frozen import record
from primtorch.interrupts import pass_on_interrupt
from primtorch.layout import contiguous_strides
from primtorch.spec import Size, TensorSpec, spec_of
from primtorch.symbolic import hint_of

_MOST = 1024
"""Elements of a call that is small enough to be made, operands and results together."""
_LEAST = 2
"""What sizes are brought down to: 1 would be broadcast, and is no place for the index 1."""
_OTHERS = (torch.float32, torch.int64, torch.int32, torch.bool, torch.complex64)
"""Of which dtypes an operator takes some, if it takes the sizes and the elements."""
_INDICES = (torch.bool, torch.uint8, torch.int32, torch.int64)
_FILLS = (1, 0)
"""Elements: 1 divides, and is a place in LAPACK's counting as in Python's; 0 is a place in a single element."""
_COMMON = frozenset({torch.float32, torch.float64})
_REFUSALS = (RuntimeError, IndexError, TypeError, ValueError)  # what eager raises for a call that is wrong
_UNASKED = frozenset({"_pin_memory", "_resize_output_", "record_stream"})
_TAKE_MASKS = frozenset({"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"})
_CPU = torch.device("cpu")
_KEYS = DispatchKeySet(DispatchKey.CPU)

_drawing = forks.lock()  # one thread at a time has the default generator's state put back


@record
class _Call:
    """A call with descriptors for tensors, without symbols."""

    op: OpOverload
    rule: Rule
    args: tuple[object, ...]
    kwargs: dict[str, object]

    def map(self, change: Callable[[object], object]) -> _Call:
        """With other leaves, which are changed in order."""
        args = tuple([_mapped(value, change) for value in self.args])
        return _Call(self.op, self.rule, args, {name: _mapped(value, change) for name, value in self.kwargs.items()})

    def leaves(self) -> Iterator[object]:
        """What is no list, in order."""
        return _leaves((*self.args, *self.kwargs.values()))

    def reaction(self) -> tuple[str, int]:
        """What the formula says against the call, and how many elements its tensors have, results included."""
        words, results = "", None
        try:
            results = self.rule.formula(*self.args, **self.kwargs)
        except Exception as error:  # of any type: which one is no matter here
            pass_on_interrupt(error)
            words = f"{type(error).__name__}: {error}"
        return words, sum(_counts((*self.leaves(), results)))


class AskedRules:
    """Rules whose formulas refuse what eager refuses, for a mode that propagates a program that eager has not run.

    Args:
        mixed: of a derivative, only calls of several dtypes are asked, and of those that are neither float32 nor
            float64: what was taken is refused for nothing else, and to ask a convolution's takes as long as to run it.
            None with integers in several tensors, or in a tensor and a list: these are places and lengths that the
            forward has checked, and the kernel of the derivative reads and writes where they say.
    """

    def __init__(self, rules: RuleTable, mixed: bool = False) -> None:
        self._rules = rules
        self._mixed = mixed
        self._asked: dict[int, tuple[Rule, Rule]] = {}  # by the rule's identity

    def of(self, op: OpOverload) -> Rule:
        """As that of `RuleTable`."""
        rule = self._rules.of(op)
        known = self._asked.get(id(rule))
        if known is None:
            known = self._asked[id(rule)] = rule, _refusing(op, rule, self._mixed)
        return known[1]


def _refusing(op: OpOverload, rule: Rule, mixed: bool) -> Rule:
    if op._schema.name.startswith("aten::as_strided"):
        return replace(rule, formula=_within(op, rule.formula))
    return _asked(op, rule, mixed) if _asks(op, rule) else rule


def _within(op: OpOverload, formula: Formula) -> Formula:
    """The formula of an operator that says itself where in memory it reads, which only eager knows the length of."""

    def within(x: torch.Tensor, *args: object, **kwargs: object) -> object:
        given: dict[str, Any] = (
            dict(zip((argument.name for argument in op._schema.arguments), (x, *args), strict=False)) | kwargs
        )
        own: TensorSpec = getattr(x, "spec", None) or spec_of(x)
        offset = given.get("storage_offset")
        looked = TensorSpec(
            tuple(given["size"]),
            tuple(given["stride"]),
            own.dtype,
            own.device,
            own.offset if offset is None else offset,
        )
        if storage_bytes(looked) > storage_bytes(own):
            raise NoFormula(op.name(), reason="it reaches beyond the tensor's last element")
        return formula(x, *args, **kwargs)

    return within


def _asks(op: OpOverload, rule: Rule) -> bool:
    """Whether it is one of torch's own operators that compute: views take all dtypes."""
    computes = op._schema.returns and rule.alias is None and not rule.restrides and not rule.registered
    name = op._schema.name.removeprefix("aten::")
    return bool(computes) and op.namespace == "aten" and name not in _UNASKED and not is_composite(op)


def _asked(op: OpOverload, rule: Rule, mixed: bool) -> Rule:
    formula = rule.formula
    derives = "backward" in op._schema.name  # which the program may call itself
    taken: set[tuple[object, ...]] = set()  # what was asked, as `_note` tells calls apart

    def asked(*args: object, **kwargs: object) -> object:
        if (mixed and not _is_doubtful(args)) or (derives and _holds_places(args)):
            return formula(*args, **kwargs)
        doubted: list[Exception] = []
        try:
            results = formula(*args, **kwargs)
        except _REFUSALS as error:
            if not isinstance(error, PrimTorchError) or isinstance(error, PrimError):
                doubted += _doubted(_Call(op, rule, args, kwargs), error)
            if not doubted:
                raise
        if doubted:
            raise doubted.pop()
        noted: list[object] = [torch.get_default_dtype()]
        _note(args, noted)
        if kwargs:
            noted.extend(kwargs)
            _note(kwargs.values(), noted)
        key = tuple(noted)
        if key not in taken and _settles(_Call(op, rule, args, kwargs)):
            taken.add(key)
        return results

    return replace(rule, formula=asked)


def _is_doubtful(args: Sequence[object]) -> bool:
    """Whether a derivative of these operands may be refused for their dtypes."""
    dtypes = {leaf.dtype for leaf in _leaves(args) if isinstance(leaf, TENSORS)}
    return len(dtypes) != 1 or not dtypes < _COMMON


def _holds_places(args: Sequence[object]) -> bool:
    """Whether there are places and lengths beside numbers, in several tensors or in a tensor and a list."""
    dtypes = [leaf.dtype for leaf in _leaves(args) if isinstance(leaf, TENSORS)]
    integers = sum(not (dtype.is_floating_point or dtype.is_complex or dtype is torch.bool) for dtype in dtypes)
    return 0 < integers < len(dtypes) and (integers > 1 or any(isinstance(arg, list | tuple) for arg in args))


def _note(values: Iterable[Any], noted: list[object]) -> None:
    """Adds what an answer holds for: dtypes, ranks, places, channels last; kinds of numbers, whether they are more than
    1 (a stride, a dilation), and all else that is no number. It is made for every call of a program, so it asks little
    of each value."""
    for value in values:
        kind = type(value)
        if kind is TensorSpec:
            rank = len(value.shape)
            noted += (value.dtype, rank, value.device)
            if rank > 3:
                noted.append(_is_channels_last(value))
        elif kind is int:
            noted.append(value if value < 2 else int)
        elif kind in _BY_VALUE:
            noted.append(value)
        elif kind is bool:  # which is equal to a number
            noted += (kind, value)
        elif kind is list or kind is tuple:
            if value and isinstance(value[0], TENSORS):  # of many tensors each kind once
                noted.append(tuple(dict.fromkeys(map(_noted, value))))
            else:
                noted.append(_noted(*value))
        elif isinstance(value, TENSORS):
            _note((getattr(value, "spec", None) or spec_of(value),), noted)
        else:
            noted.append(kind)


def _noted(*values: object) -> tuple[object, ...]:
    noted: list[object] = []
    _note(values, noted)
    return tuple(noted)


_BY_VALUE = frozenset({str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format})


def _is_channels_last(spec: TensorSpec) -> bool:
    stride = spec.strides[1]
    return type(stride) is int and stride == 1 and not (type(spec.strides[-1]) is int and spec.strides[-1] == 1)


# No frame that is left by an error has it in a variable: it would keep what the program holds until a collection.
def _settles(call: _Call) -> bool:
    """Raises what eager's kernel on the CPU raises for operands of these dtypes, whose sizes the formula has taken.

    Returns whether it holds for tensors of other sizes: a kernel may look at no dtypes where there are no elements.
    """
    said = [_refusal(call)]
    if isinstance(said[0], Exception):
        raise said.pop()
    return bool(said[0])


def _refusal(call: _Call) -> Exception | bool:
    """What the kernel raises for these dtypes, or whether it takes them in tensors of any size."""
    with _as_the_kernel_runs(call.op):
        for small in _small(call):
            refusals: list[tuple[int, Exception]] = []
            for fill in _FILLS:
                answer = _answer(small, fill)
                if not isinstance(answer, Exception):
                    _compare(small, answer)
                    return all(_counts(small.leaves()))
                refusals.append((fill, answer))
            for fill, refusal in refusals:
                if _is_for_dtypes(small, fill):
                    return refusal
    return True


def _compare(call: _Call, results: object) -> None:
    """Raises where the formula gives other dtypes than the kernel."""
    said = call.rule.formula(*call.args, **call.kwargs)
    if isinstance(said, tuple) and isinstance(results, tuple) and len(said) == len(results):
        # A part that is not asked for may be made all the same: nobody sees it.
        results = tuple(part for part, known in zip(results, said, strict=True) if known is not None)
    expected = [leaf.dtype for leaf in _leaves([said]) if type(leaf) is TensorSpec]
    given = [leaf.dtype for leaf in _leaves([results]) if isinstance(leaf, torch.Tensor)]
    if given and expected != given:
        raise NoFormula(call.op.name(), reason=f"eager gives {given}, not {expected}, for these dtypes")


def _doubted(call: _Call, refusal: Exception) -> list[Exception]:
    """What eager's kernel raises for a call that its formula has refused, which may be another error; NoFormula where
    eager takes the call. Nothing where it cannot be asked."""
    with _as_the_kernel_runs(call.op):
        small = next(_small(call), None)
        answers = [_answer(small, fill) for fill in _FILLS] if small is not None else []
    if any(not isinstance(answer, Exception) for answer in answers):
        return [NoFormula(call.op.name(), reason=f"eager takes what it refuses: {refusal}")]
    return [answer for answer in answers[:1] if isinstance(answer, Exception)]


def _small(call: _Call) -> Iterator[_Call]:
    """The same call of few elements on the CPU, to which the formula says the same: brought down from its largest size,
    and, as a formula may take what the kernel does not, from its least. None where there is no such call."""
    call = call.map(_without_symbols)
    if call.rule.fresh:
        call.kwargs["fresh"] = _some
    specs = [leaf for leaf in call.leaves() if type(leaf) is TensorSpec]
    devices = [leaf for leaf in call.leaves() if type(leaf) is torch.device] + [spec.device for spec in specs]
    if any(device != _CPU for device in devices) or call.kwargs.get("pin_memory"):
        return
    words, elements = call.reaction()
    numbers = {leaf for leaf in call.leaves() if type(leaf) is int} | {size for spec in specs for size in spec.shape}
    for largest_first in (True, False) if elements > _MOST else (True,):
        small, count = call, elements
        for number in sorted((n for n in numbers if n > _LEAST), reverse=largest_first):
            if count <= _MOST:
                break
            smaller = small.map(lambda leaf, number=number: _with_size(leaf, number, _LEAST))  # type: ignore[misc]
            said, fewer = smaller.reaction()
            if said == words:
                small, count = smaller, fewer
        if count <= _MOST:
            yield small


def _answer(call: _Call, fill: int) -> object:
    """What the kernel gives for elements of this number, or the error that it raises."""
    places = 0 if "backward" in call.op.name() else fill  # those that a forward has found are not checked
    try:
        made = call.map(lambda leaf: _tensor(leaf, fill, places))
    except Exception:  # there are no tensors of this dtype to ask with
        return None
    made.kwargs.pop("fresh", None)
    try:
        return call.op.redispatch(_KEYS, *made.args, **made.kwargs)
    except Exception as error:  # of any type: the program's handlers tell them apart
        pass_on_interrupt(error)
        error.__context__ = None
        return error.with_traceback(None)  # whose frames would keep those around them, and what the program holds there


def _is_for_dtypes(call: _Call, fill: int) -> bool:
    """Whether the call is taken with other dtypes in the place of one or more."""
    indices = _indices(call)
    given = [leaf.dtype if type(leaf) is TensorSpec and id(leaf) not in indices else leaf for leaf in call.leaves()]
    places = [place for place, leaf in enumerate(given) if type(leaf) is torch.dtype]
    alike = [[p for p in places if given[p] is dtype] for dtype in dict.fromkeys(given[p] for p in places)]
    apart = [[place] for place in places] if len(alike) < len(places) <= 6 else []
    for groups in (alike, apart):
        dtypes = (None, *_OTHERS) if len(groups) <= 4 else _OTHERS[:3]
        for chosen in itertools.islice(itertools.product(dtypes, repeat=len(groups)), 6**4):
            other = {p: dtype for group, dtype in zip(groups, chosen, strict=True) if dtype for p in group}
            count = itertools.count()
            trial = call.map(lambda leaf, o=other, n=count: _with_dtype(leaf, o.get(next(n))))  # type: ignore[misc]
            if other and not isinstance(_answer(trial, fill), Exception):
                return True
    return False


def _indices(call: _Call) -> frozenset[int]:
    """The identities of indices: a mask in the place of numbers, or the other way about, would be other indices, with
    results of another shape."""
    if call.op._schema.name.removeprefix("aten::") not in _TAKE_MASKS:
        return frozenset()
    parts = (part for value in call.args if isinstance(value, list) for part in value)
    return frozenset(id(part) for part in parts if type(part) is TensorSpec and part.dtype in _INDICES)


@contextmanager
def _as_the_kernel_runs(op: OpOverload) -> Iterator[None]:
    """No mode, subclass or autocast sees the call, and the program's random numbers are as before."""
    with ExitStack() as stack:
        stack.enter_context(torch._C.DisableTorchFunction())
        stack.enter_context(torch._C._DisableTorchDispatch())
        stack.enter_context(torch._C._ExcludeDispatchKeyGuard(DispatchKeySet(DispatchKey.AutocastCPU)))
        if torch.Tag.nondeterministic_seeded in op.tags:
            stack.enter_context(_drawing)
            generator = torch.default_generator
            stack.callback(generator.set_state, generator.get_state())
        yield


def _mapped(value: object, change: Callable[[object], object]) -> object:
    if isinstance(value, list | tuple):
        return [_mapped(part, change) for part in value]
    return change(value)


def _leaves(values: Iterable[object]) -> Iterator[object]:
    for value in values:
        if isinstance(value, list | tuple):
            yield from _leaves(value)
        else:
            yield value


def _counts(values: Iterable[object]) -> Iterator[int]:
    """How many elements each tensor has."""
    return (int(leaf.numel()) for leaf in _leaves(values) if type(leaf) is TensorSpec)


def _without_symbols(leaf: object) -> object:
    """Of the sizes in the example; memory by rows or, where it is so, with channels last."""
    if isinstance(leaf, torch.SymInt):
        return hint_of(leaf, _LEAST)
    if isinstance(leaf, torch.SymFloat | torch.SymBool):
        return 0.5 if isinstance(leaf, torch.SymFloat) else False
    if isinstance(leaf, torch.Generator):
        return torch.Generator()
    if not isinstance(leaf, TENSORS):
        return leaf
    spec = spec_of(leaf)
    return _laid_out(spec, tuple(hint_of(size, _LEAST) for size in spec.shape), spec.dtype)


def _with_size(leaf: object, number: int, other: int) -> object:
    if type(leaf) is TensorSpec:
        return _laid_out(leaf, tuple(other if size == number else size for size in leaf.shape), leaf.dtype)
    return other if type(leaf) is int and leaf == number else leaf


def _with_dtype(leaf: object, dtype: torch.dtype | None) -> object:
    if dtype is None:
        return leaf
    return _laid_out(leaf, leaf.shape, dtype) if type(leaf) is TensorSpec else dtype


def _laid_out(like: TensorSpec, shape: Sequence[Size], dtype: torch.dtype) -> TensorSpec:
    strides = contiguous_strides(tuple(shape))
    if len(shape) > 3 and _is_channels_last(like):
        inner = contiguous_strides((shape[0], *shape[2:], shape[1]))
        strides = (inner[0], 1, *inner[1:-1])
    return TensorSpec(tuple(shape), tuple(strides), dtype, like.device)


def _tensor(leaf: object, fill: int, place: int) -> object:
    """Of one number; square matrices of ones have twos on the diagonal, so that they have an inverse and a root, and a
    mask is true in as many places as `_some` says that data have."""
    if type(leaf) is not TensorSpec:
        return leaf
    made = torch.empty_strided(leaf.shape, leaf.strides, dtype=leaf.dtype, device=leaf.device)
    if leaf.dtype is torch.bool:
        made.fill_(False)
        made.as_strided((min(made.numel(), _LEAST),), (1,)).fill_(bool(place))
        return made
    if not (leaf.dtype.is_floating_point or leaf.dtype.is_complex):
        return made.fill_(place)
    made.fill_(fill)
    if fill and len(leaf.shape) > 1 and leaf.shape[-1] == leaf.shape[-2]:
        made.diagonal(dim1=-2, dim2=-1).fill_(2)
    return made


def _some(maximum: object, minimum: int = 0, of: object = None) -> int:
    """A size that data would tell."""
    return max(minimum, _LEAST)
