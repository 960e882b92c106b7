"""What NumPy does to arrays whose elements are not known, done to tensors: the operators, functions and methods.

Each call is asked of NumPy on the models first. What it gives says which dtype, shape and layout the result has, and
whether it shares memory; a rule of the tables says which torch calls give the elements. What has no rule, or comes with
arguments that its rule does not take, breaks the graph.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch

try:
    import numpy
except ImportError:
    numpy = None  # type: ignore[assignment]

from primtorch.fake import FakeTensor
from primtorch.wrappers import whole_of
from torchdynamo.arrays import indexing
from torchdynamo.arrays.functions import FUNCTIONS, METHODS
from torchdynamo.arrays.rules import Rule, refusal, refuse_unknown
from torchdynamo.arrays.ufuncs import UFUNCS, Operand, takes
from torchdynamo.arrays.values import (
    NUMPY_DTYPES,
    Array,
    ArrayMethod,
    Model,
    arrays_in,
    dtype_of,
    flipped_dims,
    forwards,
    model_like,
    model_of,
    same_layout,
)
from torchdynamo.graph import numpy_values
from torchdynamo.graph.recorder import Recorder
from torchdynamo.graph.scalars import SYMBOLIC, concrete
from torchdynamo.graph.tensor_classes import class_of
from torchdynamo.graph.view_writes import memory_of
from torchdynamo.interpreter.iterators import SequenceIterator
from torchdynamo.interpreter.operators import BINARY, COMPARE, UNARY
from torchdynamo.interpreter.protocol import MISSING
from torchdynamo.reasons import BreakGraph

T = TypeVar("T")
_NUMBERS = (bool, int, float, complex)
_NUMBERS_OUT = frozenset({"item", "tolist"})  # methods that give Python's numbers


class ArrayWorld:
    """The arrays of one capture.

    Args:
        adopt: makes a real tensor an input that the compiled code holds.
        ambient: reads state of the process, guarded.
    """

    def __init__(
        self,
        recorder: Recorder,
        known: numpy_values.Arrays,
        adopt: Callable[[torch.Tensor], torch.Tensor],
        ambient: Callable[..., object],
    ) -> None:
        self.recorder = recorder
        self.known = known
        self.adopt = adopt
        self.ambient = ambient
        self.used = False  # whether there is any array yet
        self._unknown: dict[int, Array] = {}  # for known arrays, by the identity of what owns their memory
        self._numbers: dict[int, tuple[Array, object]] = {}  # that scalars are to torch, by identity
        self._views: dict[int, tuple[object, Array]] = {}  # for views of those, by theirs

    # -- between tensors and arrays ---------------------------------------------------------

    def of_input(self, tensor: torch.Tensor, flipped: frozenset[int]) -> Array:
        """The array of a graph input; `flipped` are the dims that the program sees backwards."""
        self.used = True
        return Array(self, model_like(tensor, flipped), tensor, flipped)

    def of_scalar(self, tensor: torch.Tensor) -> Array:
        """The scalar of a graph input without dims."""
        self.used = True
        return Array(self, NUMPY_DTYPES[tensor.dtype].type(), tensor)

    def of_tensor(self, tensor: torch.Tensor, force: bool = False) -> Array:
        """`tensor.numpy()`: the array that has its memory."""
        self.used = True
        if force:
            tensor = tensor.detach()
        special = class_of(tensor) is not None or whole_of(tensor) is not None
        if not isinstance(tensor, FakeTensor) or tensor.device.type != "cpu" or special:
            raise BreakGraph("numpy", "numpy() of a special tensor")
        if tensor.requires_grad or tensor.dtype not in NUMPY_DTYPES:
            with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():  # type: ignore[attr-defined]
                torch.empty(0, dtype=tensor.dtype, requires_grad=tensor.requires_grad).numpy()  # raises
            raise BreakGraph("numpy", f"numpy() of a tensor of {tensor.dtype}")
        node = self.recorder.node_of(tensor)
        if tensor.dtype.is_complex and (node is None or node.op != "placeholder"):
            raise BreakGraph("numpy", "numpy() of complex numbers that may be conjugated where they are read")
        return Array(self, model_like(tensor), tensor)

    def tensor_of(self, array: Array) -> torch.Tensor:
        """`torch.from_numpy(array)`: the tensor that has its memory."""
        if array.is_scalar or array.flipped or not array.model.flags.writeable:
            with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():  # type: ignore[attr-defined]
                torch.from_numpy(array.model)  # raises
            raise BreakGraph("numpy", "torch.from_numpy() of an array that may not be written to")
        return array.tensor.detach()

    def copied(self, array: Array) -> torch.Tensor:
        """`torch.tensor(array)`: the elements in memory of their own, laid out as the array where it has no gaps."""
        if array.flipped:
            with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():  # type: ignore[attr-defined]
                torch.tensor(array.model)  # raises
        made, strides = array.tensor.clone(), tuple(stride // array.model.itemsize for stride in array.model.strides)
        if array.is_scalar or not same_layout(array.model.shape, tuple(map(int, made.stride())), strides):
            return made
        return made if strides == made.stride() else made.as_strided(array.model.shape, strides)  # in dims of size 1

    def tensor(self, value: object, dtype: numpy.dtype | None = None) -> torch.Tensor:
        """A value of NumPy's as a tensor of a NumPy dtype (its own by default), for reading."""
        if isinstance(value, torch.Tensor):
            value = self.of_tensor(value)
        if isinstance(value, Array):
            found = value.value()
            wanted = dtype_of(value.model.dtype if dtype is None else dtype)
            return found if found.dtype == wanted else found.to(wanted)
        if arrays_in(value):
            return self._stacked(value, model_array(value).dtype if dtype is None else dtype)
        if not self.known.is_known(value):
            raise BreakGraph("numpy", f"an operand of type {type(value).__qualname__}")
        array = numpy.asarray(value)
        array = array.astype(array.dtype if dtype is None else dtype, order="C")
        dtype_of(array.dtype)
        with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():  # type: ignore[attr-defined]
            made = torch.from_numpy(array.copy())
        return self.adopt(made)

    def _stacked(self, value: object, dtype: numpy.dtype) -> torch.Tensor:
        """Nested lists with arrays in them, as one tensor."""
        if isinstance(value, (list, tuple)):
            return torch.stack([self._stacked(part, dtype) for part in value])
        return self.tensor(value, dtype)

    def operand(self, value: object, dtype: numpy.dtype) -> Operand:
        """An operand of a ufunc: a tensor of the loop's dtype, or the number that it is there."""
        if isinstance(value, SYMBOLIC):
            return torch.full((), value, dtype=dtype_of(dtype), device="cpu")  # type: ignore[call-overload, no-any-return]
        if type(value) in _NUMBERS or (numpy_values.is_scalar(value) and self.known.is_known(value)):
            with numpy.errstate(all="ignore"):
                number: Operand = numpy.asarray(value).astype(dtype).item()
                return number
        return self.tensor(value, dtype)

    # -- arrays that are known no more -------------------------------------------------------

    def forget(self, array: numpy.ndarray) -> Array:
        """An array that the program made of numbers, and all views of its memory, are unknown from here on."""
        self.used = True
        owner = numpy_values.memory_of(array)
        if id(owner) not in self._unknown:
            if not self.known.is_known(array) or owner.base is not None:
                raise BreakGraph("numpy", "a write to an array of the outside, or to memory of another kind")
            size = owner.itemsize
            strides = tuple(stride // size for stride in owner.strides)
            tensor = _laid_out(self.tensor(owner).clone(), owner.shape, strides)
            self._unknown[id(owner)] = Array(self, owner, tensor)
            self.known.shared[id(owner)] = owner
        made = self.current(array)
        assert isinstance(made, Array)
        return made

    def current(self, value: object) -> object:
        """What stands for a value now: for an array that is known no more, the one that is not."""
        if not self._unknown or type(value) is not numpy.ndarray:
            return value
        owner = numpy_values.memory_of(value)
        found = self._unknown.get(id(owner))
        if found is None or value is owner:
            return value if found is None else found
        if id(value) not in self._views:
            self._views[id(value)] = value, self._view(found, value)
        return self._views[id(value)][1]

    def _view(self, owner: Array, view: numpy.ndarray) -> Array:
        flipped = flipped_dims(view)
        ahead = forwards(view, flipped)
        size = view.itemsize
        if view.dtype != owner.model.dtype or any(stride % size for stride in view.strides):
            raise BreakGraph("numpy", "a view of another dtype")
        offset = (numpy_values.address(ahead) - numpy_values.address(owner.model)) // size
        strides = tuple(stride // size for stride in ahead.strides)
        return Array(self, view, owner.tensor.as_strided(ahead.shape, strides, offset), flipped)

    def release(self) -> None:
        """Lets go of the program's arrays."""
        self._unknown.clear()
        self._views.clear()
        self._numbers.clear()

    # -- asking NumPy -----------------------------------------------------------------------

    def ask(self, function: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object]) -> Any:
        """What NumPy gives for models. What it raises is the program's."""
        self._know_errors()
        with numpy.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                return function(*map(model_of, args), **{name: model_of(value) for name, value in kwargs.items()})
            except (
                ZeroDivisionError,
                numpy.linalg.LinAlgError,
            ) as error:  # of elements that the program's need not have
                raise BreakGraph("numpy", f"{type(error).__name__} by {name_of(function)}") from None

    def _know_errors(self) -> None:
        """Where floating-point errors are to raise, or to call a function, a graph is of no use."""
        if self.ambient(errors_are_told, ()):
            raise BreakGraph("ambient_state", "numpy.seterr() has floating-point errors raise or call")
        if torch.is_autocast_enabled("cpu"):
            raise BreakGraph("numpy", "arrays within autocast, which is none of NumPy's")

    def result(self, found: Any, asked: Any, sources: Sequence[Array]) -> object:
        """Tensors that a rule has given as what NumPy said that they are."""
        same = [source for source in sources if source.model is asked]
        if same:
            return same[0]
        if isinstance(found, Array) or not isinstance(found, (torch.Tensor, tuple, list)):
            return found
        if isinstance(found, (tuple, list)):
            parts = [self.result(*pair, sources) for pair in zip(found, asked, strict=True)]
            return type(asked)(*parts) if hasattr(asked, "_fields") else type(asked)(parts)
        return self._array(found, asked, sources)

    def _array(self, tensor: torch.Tensor, asked: Model, sources: Sequence[Array]) -> Array:
        wanted, shape = dtype_of(asked.dtype), tuple(asked.shape)
        if tuple(map(int, tensor.shape)) != shape:
            raise BreakGraph("numpy", f"a result of shape {tuple(tensor.shape)}, where NumPy's has {shape}")
        scalar = not isinstance(asked, numpy.ndarray)
        tensor = tensor if tensor.dtype == wanted else tensor.to(wanted)
        owners = () if scalar else [s for s in sources if not s.is_scalar and numpy.may_share_memory(s.model, asked)]
        shared = [source for source in sources if memory_of(source.tensor) is memory_of(tensor)]
        strides = tuple(stride // asked.dtype.itemsize for stride in asked.strides)
        if not owners:
            return Array(self, asked, _laid_out(tensor.clone() if shared else tensor, shape, strides))
        own = tuple(map(int, tensor.stride()))
        if not any(owner in shared for owner in owners) or not same_layout(shape, own, strides):
            raise BreakGraph("numpy", "a view of an array that torch does not have")
        return Array(self, asked, tensor)

    # -- calls ------------------------------------------------------------------------------

    def call(self, function: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        """A function of NumPy on arrays, tensors and what is known."""
        if type(function) is numpy.ufunc:
            return self._ufunc(function, args, kwargs)
        rule = FUNCTIONS.get(function)
        if rule is None:
            raise _refusal(function)
        return self._by_rule(rule, function, args, kwargs)

    def method(self, array: Array, name: str, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        """A call of a method of `numpy.ndarray`. Breaks the graph where no rule knows it."""
        operator = _OPERATOR_METHODS.get(name)
        if operator is not None and len(args) == operator[1] and not kwargs:
            return operator[0](self, array, *args)
        if name in _NUMBERS_OUT and not args and not kwargs:
            return self.number(array, name)
        rule = METHODS.get(name)
        if rule is None:
            if name in _NUMBERS_OUT:
                raise BreakGraph("tensor_to_number", f"{name}() of an array")
            raise refusal(name, "")
        return self._by_rule(rule, getattr(type(array.model), name), (array, *args), kwargs)

    def number(self, array: Array, name: str) -> object:
        """`float(array)`, `int(array)`, `array.item()`, `array.tolist()`: numbers that the graph tells when it runs."""
        if name.startswith("__") and array.model.ndim:  # NumPy warns, or raises
            raise BreakGraph("tensor_to_number", f"{name.strip('_')}() of an array that is no scalar")
        if name == "item":
            self.ask(lambda model: model.item(), (array,), {})  # raises where there is not one element
        taken = self.recorder.take_number(name, array.value())
        if taken is MISSING:
            raise BreakGraph("tensor_to_number", f"{name.strip('_')}() of an array")
        return taken

    def as_numbers(self, given: T) -> T:
        """Arguments with a number in the place of each scalar, as torch takes one: a float for a truth value, too."""
        value: Any = given
        if isinstance(value, Array) and value.is_scalar:
            value = self._as_number(value)
        elif type(value) in (tuple, list):
            value = type(value)(map(self.as_numbers, value))
        elif type(value) is dict:
            value = {key: self.as_numbers(part) for key, part in value.items()}
        elif type(value) is slice:
            value = slice(*map(self.as_numbers, (value.start, value.stop, value.step)))
        given = value
        return given

    def _as_number(self, scalar: Array) -> object:
        known = self._numbers.get(id(scalar))
        if known is None:
            kind = scalar.model.dtype.kind
            if kind not in "iufb":
                raise BreakGraph("numpy", "a complex scalar as a number")  # torch warns, and takes the real part
            tensor = scalar.tensor if kind in "iu" else scalar.tensor.to(torch.float64)
            number = self.recorder.take_number("item", tensor)
            if number is MISSING:
                raise BreakGraph("tensor_to_number", "a NumPy scalar as a number")
            known = self._numbers[id(scalar)] = scalar, number
        return known[1]

    def _by_rule(
        self, rule: Rule, function: Callable[..., object], args: tuple[Any, ...], kwargs: dict[str, object]
    ) -> object:
        self.used = True
        if kwargs.get("out", ...) is None:
            kwargs = {name: value for name, value in kwargs.items() if name != "out"}
        args, kwargs = self._as_arrays(args), self._as_arrays(kwargs)
        if rule.writes and args[0].is_scalar:  # the write is one to a copy
            raise BreakGraph("numpy", f"{name_of(function)} of a scalar")
        if rule.writes:
            self.refuse_write(args[0])
        try:
            bound = inspect.signature(rule.program).bind(self, None, *args, **kwargs)
        except TypeError:
            self.ask(function if rule.asks is None else rule.asks(function), args, kwargs)  # may raise: it is no call
            if name_of(function) == "numpy.where":
                raise _refusal(function) from None
            raise BreakGraph("numpy", f"call of {name_of(function)} with these arguments") from None
        world, answer, *_ = bound.arguments
        refuse_unknown({name: value for name, value in bound.arguments.items() if name not in (world, answer)})
        asked = self.ask(function if rule.asks is None else rule.asks(function), args, kwargs)
        bound.arguments[answer] = asked
        try:
            found = rule.program(*bound.args, **bound.kwargs)
        except RuntimeError as error:  # NumPy has taken the call
            raise BreakGraph("numpy", f"call of {name_of(function)}: {error}") from error
        return self.result(found, asked, arrays_in((args, kwargs)))

    def _as_arrays(self, given: T) -> T:
        """The value with arrays in the place of tensors, which NumPy asks for theirs."""
        value: Any = given
        if isinstance(value, torch.Tensor):
            value = self.of_tensor(value)
        elif type(value) is numpy.ndarray:
            value = self.current(value)
        elif type(value) in (tuple, list):
            value = type(value)(map(self._as_arrays, value))
        elif type(value) is dict:
            value = {name: self._as_arrays(part) for name, part in value.items()}
        given = value
        return given

    def _ufunc(self, function: numpy.ufunc, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        """Of a tensor, NumPy makes an array, and of the result a tensor: of truth values, one of uint8."""
        program = UFUNCS.get(function)
        if program is not None and len(args) == function.nin and kwargs.keys() == {"out"} and function.nout == 1:
            return self._ufunc_into(function, program, args, kwargs["out"])
        if program is None or kwargs or len(args) != function.nin:
            what = " with out, where or the like" if program is not None else ""
            raise BreakGraph("numpy", f"call of {name_of(function)}{what}")
        tensors = any(isinstance(arg, torch.Tensor) for arg in args)
        if tensors and function.nout > 1:
            raise BreakGraph("numpy", f"call of {name_of(function)} with a tensor")
        args = self._as_arrays(args)
        if function is numpy.power and isinstance(args[1], Array) and args[1].model.shape[-1:] in ((), (1,)):
            raise BreakGraph("numpy", "a power by one number that is not known")  # by a half it is a root
        made = self.result(*self._computed(function, program, args), arrays_in(args))
        if not tensors:
            return made
        assert isinstance(made, Array)  # of one output
        found = made.tensor.clone() if made.is_scalar else self.tensor_of(made)
        return found.to(torch.uint8) if found.dtype == torch.bool else found

    def _ufunc_into(
        self, function: numpy.ufunc, program: Callable[..., object], args: tuple[object, ...], out: Any
    ) -> object:
        """`numpy.add(a, b, out=c)`: a write to `c`."""
        given = out[0] if type(out) is tuple and len(out) == 1 else out
        if given is None:
            return self._ufunc(function, args, {})
        target = self.forget(given) if type(given) is numpy.ndarray else given
        if not isinstance(target, Array) or any(isinstance(arg, torch.Tensor) for arg in args):
            raise BreakGraph("numpy", f"call of {name_of(function)} with out, and a tensor")
        args = self._as_arrays(args)
        self.refuse_write(target)
        into = {"out": numpy.empty_like(target.model)}
        self.ask(function, tuple(map(_model_of_number, args)), into)  # raises where the results do not fit there
        found, _ = self._computed(function, program, args)
        self.write(target, found)
        return given

    def _computed(
        self, function: numpy.ufunc, program: Callable[..., object], args: tuple[object, ...]
    ) -> tuple[Any, Any]:
        """The tensors that a ufunc gives, and what NumPy says of them."""
        models = tuple(map(_model_of_number, args))
        asked = self.ask(function, models, {})
        loop = function.resolve_dtypes((*map(_kind, models), *(None,) * function.nout))
        if any(isinstance(arg, SYMBOLIC) for arg in args) and any(dtype.kind != "f" for dtype in loop[: function.nin]):
            return self._computed(function, program, concrete(args))  # what whole numbers may be hangs on their values
        made = (asked,) if function.nout == 1 else asked
        if any(one.dtype != dtype for one, dtype in zip(made, loop[function.nin :], strict=True)):
            raise BreakGraph("numpy", f"call of {name_of(function)} by rules of another NumPy")
        for value, dtype in zip(args, loop, strict=False):
            if type(value) is int and dtype.kind in "iu" and not _holds(dtype, value):
                raise BreakGraph("numpy", f"the number {value} among elements of {dtype}")
        takes(function, loop, models)
        operands = [self.operand(value, dtype) for value, dtype in zip(args, loop, strict=False)]
        if not any(isinstance(operand, torch.Tensor) for operand in operands):
            raise BreakGraph("numpy", f"call of {name_of(function)}")
        if function is not numpy.matmul and not isinstance(operands[0], torch.Tensor):
            operands[0] = torch.full((), operands[0], dtype=dtype_of(loop[0]), device="cpu")
        return program(*operands), asked

    # -- operators --------------------------------------------------------------------------

    def binary(self, symbol: str, a: object, b: object) -> object:
        """`a op b` for a symbol of Python's, where one of them is an array."""
        function = OPERATORS[symbol]
        if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
            return self._with_tensor(symbol, a, b)
        return self.call(function, (a, b), {})

    def _with_tensor(self, symbol: str, a: Any, b: Any) -> object:
        """`tensor + array`, which torch leaves to NumPy; `tensor * scalar`, which is torch's."""
        array = a if isinstance(a, Array) else b
        tensor = b if isinstance(a, Array) else a
        if array.is_scalar and array.model.dtype == numpy.float64 and tensor.is_floating_point() and tensor.dim():
            operands = tuple(x.tensor if isinstance(x, Array) else x for x in (a, b))
            return BINARY[symbol][0](*operands)
        if array.is_scalar:
            return BINARY[symbol][0](*self.as_numbers((a, b)))
        if isinstance(a, Array) or symbol not in _LEFT_TO_NUMPY:
            raise BreakGraph("numpy", f"{symbol} of an array and a tensor")
        return self._ufunc(OPERATORS[symbol], (a, b), {})

    def inplace(self, symbol: str, a: object, b: object) -> object:
        """`a op= b`: a write to the array's memory, of which views know; of a scalar, another scalar."""
        if isinstance(a, torch.Tensor) and isinstance(b, Array) and b.is_scalar:
            return BINARY[symbol][1](*self.as_numbers((a, b)))
        if isinstance(b, torch.Tensor) or isinstance(a, torch.Tensor):
            raise BreakGraph("numpy", f"{symbol}= of an array and a tensor")
        if not isinstance(a, Array):
            if not numpy_values.is_array(a):
                return self.binary(symbol, a, b)
            self.inplace(symbol, self.forget(a), b)
            return a
        if a.is_scalar:
            return self.binary(symbol, a, b)
        function = OPERATORS[symbol]
        program = UFUNCS.get(function)
        if program is None or symbol == "@":
            raise BreakGraph("numpy", f"{symbol}= of an array")
        self.refuse_write(a)
        self.ask(BINARY[symbol][1], (a, _model_of_number(b)), {})
        found, asked = self._computed(function, program, (a, b))
        self.write(a, found.to(dtype_of(asked.dtype)))
        return a

    def unary(self, symbol: str, a: Array) -> object:
        """`-array`, `+array` or `~array`."""
        return self.call({"-": numpy.negative, "+": numpy.positive, "~": numpy.invert}[symbol], (a,), {})

    def compare(self, symbol: str, a: object, b: object) -> object:
        """A comparison, element by element; with what is neither an array nor a number the graph breaks."""
        if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
            if not all(one.is_scalar for one in arrays_in((a, b))):
                raise BreakGraph("numpy", f"{symbol} of an array and a tensor")
            return COMPARE[symbol][0](*self.as_numbers((a, b)))
        known = all(isinstance(value, (Array, *SYMBOLIC)) or self.known.is_known(value) for value in (a, b))
        if not known or a is None or b is None or isinstance(a, (str, bytes)) or isinstance(b, (str, bytes)):
            raise BreakGraph("numpy", f"{symbol} of an array and what is none")
        return self.call(OPERATORS[symbol], (a, b), {})

    # -- items ------------------------------------------------------------------------------

    def getitem(self, array: object, key: object) -> object:
        """`array[key]`: a view or a copy, as NumPy has it. Raises what NumPy raises."""
        if not isinstance(array, Array):
            return self._item_by_array(array, key)
        if isinstance(key, str) or (array.is_scalar and key not in ((), ...)):
            return self.ask(_ITEM, (array, key), {})  # raises
        key = self._as_arrays(key)
        indexing.refuse_unknown_slices(key)
        if indexing.is_basic(key):
            asked = self.ask(_ITEM, (array, key), {})
            view, flipped = indexing.basic(array, key)
            if not isinstance(asked, numpy.ndarray):
                return Array(self, asked, view.clone())
            return Array(self, asked, view, flipped)
        index = indexing.advanced(self, array, key)
        asked = self.ask(_ITEM, (array, _zeros(key)), {})
        return self.result(array.value()[index], asked, (array,))

    def _item_by_array(self, obj: object, key: object) -> object:
        """A tensor, or a known array, indexed by arrays."""
        if isinstance(obj, torch.Tensor):
            items = key if type(key) is tuple else (key,)
            if any(isinstance(item, Array) and (item.is_scalar or item.flipped) for item in items):
                raise BreakGraph("numpy", "an index of a tensor")
            return obj[tuple(item.tensor if isinstance(item, Array) else item for item in items)]
        if numpy_values.is_array(obj) and self.known.is_known(obj):
            return self.getitem(Array(self, obj.copy(), self.tensor(obj)), key)
        raise BreakGraph("tensor_to_number", "a NumPy scalar or an array as an index")

    def setitem(self, array: object, key: object, value: object) -> None:
        """`array[key] = value`, of which views know."""
        if not isinstance(array, Array):
            if not numpy_values.is_array(array):
                raise BreakGraph("numpy", "a write of an array, or by an index of one, to what is none")
            array = self.forget(array)
        self.refuse_write(array)
        key, value = self._as_arrays(key), self._as_arrays(value)
        indexing.refuse_unknown_slices(key)
        mask = indexing.mask_of(key, array)
        if model_array(value).ndim and (mask is not None or indexing.has_mask(key)):  # NumPy counts both
            raise BreakGraph("data_dependent_shape", "a write of as many elements as an index of truth values says")
        self.ask(_WRITE, (array, _zeros(key), value), {})
        given = self.tensor(value)
        if given.dtype.is_complex and not array.tensor.dtype.is_complex:
            raise BreakGraph("numpy", "a write of complex numbers to real ones")
        if indexing.is_basic(key):
            view, flipped = indexing.basic(array, key)
            self._put(view, flipped, given)
            return
        if mask is not None and not given.dim():
            self.write(array, torch.where(self.tensor(mask), given.to(array.tensor.dtype), array.value()))
            return
        if array.flipped or (given.dim() and indexing.is_repeated(key)):
            raise BreakGraph("numpy", "a write by an index of arrays")
        index = indexing.advanced(self, array, key)
        self._tell(array.tensor)
        array.tensor[index] = given.to(array.tensor.dtype)

    def write(self, array: Array, value: torch.Tensor) -> None:
        """New elements for all of an array."""
        self._put(array.tensor, array.flipped, value)

    def _put(self, view: torch.Tensor, flipped: frozenset[int], value: torch.Tensor) -> None:
        self._tell(view)
        if memory_of(value) is memory_of(view):
            value = value.clone()
        while value.dim() > view.dim():
            value = value.squeeze(0)
        if value.dtype != view.dtype:
            value = value.to(view.dtype)
        if flipped:
            value = value.expand(view.shape).flip(tuple(flipped))
        view.copy_(value)

    def refuse_write(self, array: Array) -> None:
        """Raises what NumPy does where an array may not be written to."""
        if array.is_scalar or not array.model.flags.writeable:
            self.ask(_WRITE, (array, ..., 0), {})

    def _tell(self, tensor: torch.Tensor) -> None:
        """NumPy's writes are not told to autograd: a graph's are."""
        if self.recorder.has_derivative(tensor):
            raise BreakGraph("numpy", "a write to the memory of a tensor that requires a gradient")

    def iterate(self, array: Array) -> SequenceIterator:
        """Over the rows, each made when its turn comes."""
        if array.is_scalar or not array.model.ndim:
            iter(array.model)  # type: ignore[arg-type]  # raises
        return SequenceIterator(array)

    # -- attributes -------------------------------------------------------------------------

    def getattr(self, array: Array, name: str) -> object:
        """An attribute of an array: what its model answers, or a rule."""
        if name == "__class__":
            return array.native
        if name in _METADATA:
            return getattr(array.model, name)
        if name in _VIEWS:
            return self._by_rule(_VIEWS[name], lambda model: getattr(model, name), (array,), {})
        value = getattr(array.model, name)  # or raises
        if callable(value):
            return ArrayMethod(array, name)
        raise BreakGraph("numpy", f"attribute {name!r} of an array")

    # -- leaving ----------------------------------------------------------------------------

    def leaving(self, array: Array) -> tuple[tuple[int, ...], tuple[int, ...] | None, bool, bool]:
        """What `array_of` needs beside the tensor."""
        if array.is_scalar:
            return (), None, True, True
        model, size = array.model, array.model.itemsize
        strides = [
            -int(stride) * size if dim in array.flipped else int(stride) * size
            for dim, stride in enumerate(array.tensor.stride())
        ]
        same = tuple(strides) == model.strides and 1 not in model.shape  # there, operators give any stride
        return tuple(sorted(array.flipped)), None if same else model.strides, bool(model.flags.writeable), False


def _refusal(function: Callable[..., object]) -> BreakGraph:
    module, _, name = name_of(function).rpartition(".")
    return refusal(name, f"{module}.")


def _operator_methods() -> dict[str, tuple[Callable[..., object], int]]:
    """What the methods of operators do, and how many operands each has beside the array."""
    found: dict[str, tuple[Callable[..., object], int]] = {
        "__getitem__": (ArrayWorld.getitem, 1),
        "__setitem__": (ArrayWorld.setitem, 2),
    }
    for symbol, (_, _, method, reflected, in_place) in BINARY.items():
        found[method] = (lambda world, a, b, symbol=symbol: world.binary(symbol, a, b), 1)
        found[reflected] = (lambda world, a, b, symbol=symbol: world.binary(symbol, b, a), 1)
        found[in_place] = (lambda world, a, b, symbol=symbol: world.inplace(symbol, a, b), 1)
    for symbol, (_, method, _) in COMPARE.items():
        found[method] = (lambda world, a, b, symbol=symbol: world.compare(symbol, a, b), 1)
    for symbol, (_, method) in UNARY.items():
        found[method] = (lambda world, a, symbol=symbol: world.unary(symbol, a), 0)
    return found


_OPERATOR_METHODS = _operator_methods()


def errors_are_told() -> bool:
    """Whether NumPy does more about a floating-point error than to warn."""
    return any(how not in ("warn", "ignore") for how in numpy.geterr().values())


def name_of(function: object) -> str:
    """The name of a function with its module, for messages."""
    name = getattr(function, "__qualname__", None) or getattr(function, "__name__", None) or type(function).__name__
    return f"{getattr(function, '__module__', None) or 'numpy'}.{name}"


def model_array(value: object) -> numpy.ndarray:
    """What stands for a value when NumPy is asked, as an array."""
    return numpy.asarray(model_of(value))


def _model_of_number(value: object) -> object:
    """A number of its type for a symbol, on whose value no type hangs where the elements are floating."""
    return value.node.pytype(1) if isinstance(value, SYMBOLIC) else value


def _kind(value: object) -> numpy.dtype | type:
    """What a ufunc's rule for dtypes takes for an operand: a Python number has none of its own."""
    if type(value) in (int, float, complex):
        return type(value)
    model = model_of(value)
    return model.dtype if hasattr(model, "dtype") else numpy.asarray(model).dtype


def _holds(dtype: numpy.dtype, value: int) -> bool:
    info = numpy.iinfo(dtype)
    return bool(info.min <= value <= info.max)


def _zeros(key: Any) -> object:
    """The index with zeros in the place of whole numbers that are not known: places that all arrays have."""
    if isinstance(key, Array):
        return numpy.zeros_like(key.model)
    return type(key)(map(_zeros, key)) if type(key) in (tuple, list) else key


def _laid_out(tensor: torch.Tensor, shape: tuple[int, ...], strides: tuple[int, ...]) -> torch.Tensor:
    """The tensor with these strides, in memory of its own."""
    if same_layout(shape, tuple(map(int, tensor.stride())), strides):
        return tensor
    order = sorted(range(len(shape)), key=lambda dim: (-strides[dim], dim))
    moved = tensor.permute(order).contiguous()
    if not same_layout(moved.shape, tuple(map(int, moved.stride())), tuple(strides[dim] for dim in order)):
        raise BreakGraph("numpy", "an array with gaps in its memory")
    return moved.permute([order.index(dim) for dim in range(len(shape))])


def _ITEM(array: Any, key: object) -> object:
    return array[key]


def _WRITE(array: Any, key: Any, value: Any) -> None:
    array[key] = value


OPERATORS: dict[str, numpy.ufunc] = {}
_METADATA = frozenset({"shape", "ndim", "size", "dtype", "itemsize", "nbytes", "strides"})
_VIEWS = {name: METHODS[name] for name in ("T", "mT", "real", "imag") if name in METHODS}
_LEFT_TO_NUMPY = frozenset({"+", "-", "*", "/"})
if numpy is not None:
    OPERATORS = {
        "+": numpy.add, "-": numpy.subtract, "*": numpy.multiply, "/": numpy.true_divide, "//": numpy.floor_divide,
        "%": numpy.remainder, "**": numpy.power, "@": numpy.matmul, "&": numpy.bitwise_and, "|": numpy.bitwise_or,
        "^": numpy.bitwise_xor, "<<": numpy.left_shift, ">>": numpy.right_shift, "divmod": numpy.divmod,
        "==": numpy.equal, "!=": numpy.not_equal, "<": numpy.less, "<=": numpy.less_equal, ">": numpy.greater,
        ">=": numpy.greater_equal,
    }  # fmt: skip
