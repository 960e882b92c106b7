"""`__torch_function__` of tensor classes: capture asks it in torch's place, and interprets it.

The recorder hands over each call that an argument's class has a say in (`graph/tensor_classes.py`). Torch's default
runs the call with the classes switched off and gives the class to its results.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn
from torch.overrides import get_default_nowrap_functions

from primtorch.fake import FakeTensor
from primtorch.wrappers import is_wrapper
from torchdynamo.calls import masked, tensor_operators
from torchdynamo.graph import torch_functions
from torchdynamo.graph.recorder import tensors_in
from torchdynamo.graph.tensor_classes import DEFAULT, PLAIN_TENSORS, is_capturable, is_default, remember_class
from torchdynamo.interpreter.protocol import Args, Callee, InterpreterApi, Kwargs, World
from torchdynamo.outside.outside import Outside
from torchdynamo.outside.overlays import MISSING
from torchdynamo.reasons import BreakGraph

_NEW: object = torch.Tensor.__new__
_NO_DISPATCH: object = torch.Tensor.__torch_dispatch__


class Overrides:
    """What calls mean to the classes of their arguments, and how tensors of such classes are made."""

    def __init__(self, outside: Outside, world: World, interpreter: InterpreterApi) -> None:
        self.outside = outside
        self.world = world
        self.interpreter = interpreter
        self.recorder = outside.recorder
        self.recorder.override = self.ask
        self.recorder.mode_override = self.ask_mode

    def rules(self) -> Iterator[tuple[object, Callable[..., object]]]:
        """The functions of torch's that ask for overrides, and what calls of them mean."""
        yield DEFAULT, self._default
        yield torch.overrides.handle_torch_function, self._handle
        yield _NEW, self._new
        yield torch.Tensor._make_subclass, self._make_subclass

    def ask(self, kinds: tuple[type, ...], func: Callee, args: Args, kwargs: Mapping[str, object] | None) -> object:
        """The first answer of the classes, as torch asks them."""
        self.interpreter.tail_call = False
        func = tensor_operators.TOLD.get(func, func)
        if masked.has_meanings(kinds):
            self.outside.torch_names.of_tensor(kinds[0], "__torch_function__")
            result = masked.meaning(self.recorder, func, args, kwargs)
            return self.by_default(kinds[0], func, kinds, args, dict(kwargs or {})) if result is MISSING else result
        for kind in kinds:
            if issubclass(kind, torch.Tensor):
                self.outside.torch_names.of_tensor(kind, "__torch_function__")
            if is_default(kind):
                result = self.by_default(kind, func, kinds, args, dict(kwargs or {}))
            else:
                given = (func, kinds, args) if kwargs is None else (func, kinds, args, dict(kwargs))
                result = self.world.call(self.world.getattr(kind, "__torch_function__"), given, {})
            if result is not NotImplemented:
                return result
        name = getattr(func, "__name__", func)
        raise TypeError(f"no implementation found for {name!r} on types that implement __torch_function__: {kinds}")

    def ask_mode(
        self, mode: object, func: Callee, kinds: Iterable[type], args: Args, kwargs: Mapping[str, object] | None
    ) -> object:
        """The answer of a function mode that the program has entered: its `__torch_function__` is interpreted."""
        self.interpreter.tail_call = False
        answer = self.world.getattr(mode, "__torch_function__")
        result = self.world.call(answer, (func, tuple(kinds), args, dict(kwargs or {})), {})
        if result is NotImplemented:
            raise BreakGraph(
                "ambient_state", f"{type(mode).__qualname__} leaves a call to the classes of its arguments"
            )
        return result

    def by_default(self, kind: type, func: Callee, kinds: Iterable[type], args: Args, kwargs: Kwargs) -> object:
        """What `torch.Tensor.__torch_function__` does."""
        if not all(issubclass(kind, other) for other in kinds):
            return NotImplemented
        with self._off():
            inlined = isinstance(func, types.FunctionType) and not torch_functions.is_leaf(func)
            result = self.world.call(func, args, kwargs) if inlined else func(*args, **kwargs)
            if func in get_default_nowrap_functions():
                return result
            return self._converted(result, kind, tensors_in((args, kwargs)))

    def _converted(self, result: object, kind: type, seen: list[torch.Tensor]) -> object:
        if kind is torch.Tensor:
            return result
        if isinstance(result, torch.Tensor):
            if issubclass(self.outside.type_of(result), kind):
                return result
            if any(result is tensor for tensor in seen) or self.outside.externals.lookup(result) is not None:
                return self.recorder.as_subclass(result, kind)
            remember_class(result, kind)  # nobody has seen it without the class
            return result
        if isinstance(result, (tuple, list)):
            return type(result)(self._converted(item, kind, seen) for item in result)
        return result

    def _default(self, fn: Callee, args: Args, kwargs: Kwargs) -> object:
        """The program calls it, by `super()`."""
        names = ("cls", "func", "types", "args", "kwargs")
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        keywords = given.get("kwargs")
        self.interpreter.tail_call = False
        return self.by_default(given["cls"], given["func"], given["types"], given.get("args", ()), keywords or {})

    def _handle(self, fn: Callee, args: Args, kwargs: Kwargs) -> object:
        """A function in Python asks for what its arguments' classes have to say."""
        return self.recorder.__torch_function__(args[0], (), args[2:], kwargs)

    # -- blocks -----------------------------------------------------------------------------

    @contextmanager
    def _off(self) -> Iterator[None]:
        self.recorder.overrides_off += 1
        try:
            yield
        finally:
            self.recorder.overrides_off -= 1

    def switch(self, name: str) -> None:
        """The program enters or leaves a block in which the classes are not asked."""
        self.recorder.overrides_off += 1 if name == "__enter__" else -1

    # -- new tensors ------------------------------------------------------------------------

    def makes(self, fn: Callee, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        """A class is called: one that leaves the making to torch is another view of the tensor that it is given."""
        if not isinstance(fn, type) or not issubclass(fn, torch.Tensor) or fn in PLAIN_TENSORS:
            return MISSING
        if is_wrapper(fn):
            self.outside.wrappers.know(fn)
            if masked.has_meanings((fn,)):
                masked.warn_of(self.recorder, args, kwargs)
            return self.recorder.make_wrapper(fn, args, kwargs)
        if fn.__torch_dispatch__ is not _NO_DISPATCH:  # operators on it mean what no graph of plain tensors says
            raise BreakGraph("tensor_subclass", f"a {fn.__qualname__} is made, which cannot be taken apart")
        if fn.__new__ is not _NEW or fn.__init__ is not torch.Tensor.__init__:
            return MISSING
        return self._new(_NEW, (fn, *args), kwargs)

    def _new(self, fn: Callee, args: Args, kwargs: Kwargs) -> object:
        kind, *data = args
        if kind is torch.Tensor:
            return MISSING
        if kwargs or len(data) != 1 or not isinstance(data[0], FakeTensor) or not is_capturable(kind):
            raise BreakGraph("tensor_subclass", f"a {kind.__qualname__} is made")
        return self.recorder.as_subclass(data[0], kind)

    def _make_subclass(self, fn: Callee, args: Args, kwargs: Kwargs) -> object:
        """What makes an `nn.Parameter`, and tensors of classes with their own `__new__`. One that requires no gradient
        is its data by another type."""
        kind, data, *rest = args
        takes = kind is nn.Parameter or (kind not in PLAIN_TENSORS and is_capturable(kind))
        if not takes or not isinstance(data, FakeTensor) or kwargs or len(rest) > 1:
            raise BreakGraph("tensor_subclass", f"a {kind.__qualname__} is made")
        if rest and rest[0]:
            raise BreakGraph(
                "leaf", "a Parameter is made" if kind is nn.Parameter else f"a {kind.__qualname__} is made"
            )
        with self._off():
            made = data.detach()
        remember_class(made, kind)
        if issubclass(kind, nn.Parameter):
            made._is_param = True  # type: ignore[attr-defined]
        return made
