"""Calls whose meaning capture knows: torch's functions, module calls, questions about compilation, marked functions.

`Calls.handle` answers with the result, with `Redirect` to the Python call that the call comes down to, or with
MISSING when the call is nothing special and the interpreter's own rules apply.
"""

from __future__ import annotations

import contextvars
import copy
import functools
import importlib
import inspect
import linecache
import pickle
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.utils.checkpoint
from torch import nn
from torch.autograd.profiler import record_function as _ProfilerRange
from torch.optim import optimizer

from primtorch import ambient
from primtorch.communication import is_wait
from primtorch.fake import FakeTensor
from torchdynamo._C import CompiledCallable
from torchdynamo.calls import (
    covariances,
    jagged_calls,
    masked,
    packed_parameters,
    tensor_operators,
    torch_calls,
    typed_constructors,
)
from torchdynamo.calls.array_calls import ArrayCalls
from torchdynamo.calls.autograd_functions import AutogradFunctions
from torchdynamo.calls.caches import Caches
from torchdynamo.calls.checkpoints import call_checkpointed
from torchdynamo.calls.collectives import FUNCTIONAL, inlines, wait, with_group_named
from torchdynamo.calls.duals import Duals
from torchdynamo.calls.emissions import Emissions
from torchdynamo.calls.engine import Engine
from torchdynamo.calls.higher_order import HigherOrderCalls
from torchdynamo.calls.jagged_calls import is_interpreted, is_method
from torchdynamo.calls.layouts import inlines as lays_out
from torchdynamo.calls.layouts import layout
from torchdynamo.calls.open_blocks import OpenBlocks
from torchdynamo.calls.optimizers import LOOPS, OF_SCALERS, hands_over_tensors, loop_for
from torchdynamo.calls.other_forms import OF_OPERATORS, OTHER_FORMS, dispatched, implementation
from torchdynamo.calls.overrides import Overrides
from torchdynamo.calls.patches import behind_patch
from torchdynamo.calls.process_groups import ProcessGroups
from torchdynamo.calls.random_state import RandomState
from torchdynamo.calls.redirect import Redirect
from torchdynamo.calls.transforms import MAKERS, Transforms, is_transformed
from torchdynamo.calls.works import Works
from torchdynamo.calls.written_collectives import inlined, write_collective, writes
from torchdynamo.graph import known_tensors as constants
from torchdynamo.graph import leaving, numpy_values, scalars, torch_functions
from torchdynamo.graph.recorder import METHODS_OF_FAKES, tensors_in
from torchdynamo.graph.run_time_texts import RunTimeText
from torchdynamo.graph.scalars import SYMBOLIC
from torchdynamo.graph.taken_numbers import TAKING
from torchdynamo.graph.tensor_classes import SWITCHES, TENSOR_METACLASSES, class_of, is_instance, overriding
from torchdynamo.interpreter.attributes import python_method
from torchdynamo.interpreter.protocol import Args, Callee, InterpreterApi, Kwargs, Rule, World
from torchdynamo.marks import STAND_INS, Mark, MarkKind, graph_break, is_compiling, mark_of, region
from torchdynamo.outside import imports
from torchdynamo.outside.externals import is_constant
from torchdynamo.outside.loops import OpenRange
from torchdynamo.outside.one_process import note_answer
from torchdynamo.outside.outside import Outside
from torchdynamo.outside.overlays import MISSING
from torchdynamo.reasons import BreakGraph
from torchdynamo.sources import own_dict

_Copied = tuple[dict[int, object], object]  # a deep copy of a tensor: the memo, and the tensor's memory


class CallingWorld(World, Protocol):
    """The world of a capture, as calls see it."""

    def import_by(
        self, namespace: Mapping[str, object], name: str, fromlist: Sequence[str] | None, level: int
    ) -> object:
        """What an `import` of the program gives, for the names of `namespace`."""


class Calls:
    """Rules by identity of the function, then by its kind."""

    def __init__(self, outside: Outside, world: CallingWorld, interpreter: InterpreterApi) -> None:
        self.outside = outside
        self.world = world
        self.interpreter = interpreter
        self.autograd_functions = AutogradFunctions(outside, world, interpreter)
        self.transforms = Transforms(outside, world)
        self.duals = Duals(outside, self.transforms)
        self.higher_order = HigherOrderCalls(outside, world, interpreter)
        self.engine = Engine(outside, world)
        self.emissions = Emissions(outside, world, interpreter)
        self.caches = Caches(outside, world, interpreter, self.emissions)
        self.blocks = OpenBlocks(outside.recorder, self.emissions)
        self.arrays = ArrayCalls(outside.arrays)
        self.random_state = RandomState(outside)
        self.process_groups = ProcessGroups(outside)
        self.works = Works(outside)
        self.overrides = Overrides(outside, world, interpreter)
        self.copied: list[_Copied] = []
        rooms = (
            self.emissions, self.blocks, self.overrides, self.random_state, self.duals, self.process_groups, self.works,
        )  # fmt: skip
        self._rules: dict[int, Rule] = {
            **{id(function): functools.partial(rule, self) for function, rule in _RULES},
            **{id(function): rule for known in rooms for function, rule in known.rules()},
            **{id(function): rule for function, rule in tensor_operators.RULES},
            **{id(function): rule for function, rule in jagged_calls.rules(outside.recorder.jagged)},
            **{id(function): rule for function, rule in covariances.rules(outside.recorder)},
        }

    def handle(self, fn: Any, args: Args, kwargs: Kwargs) -> object:
        """What a call gives, a `Redirect`, or MISSING where the interpreter's own rules apply. Breaks the graph for
        what leaves it."""
        if id(fn) in STAND_INS:
            return self._marked(STAND_INS[id(fn)][1], fn, args, kwargs)
        if self.arrays.concerned:
            found = self.arrays.handle(fn, args, kwargs)
            if found is not MISSING:
                return found
        rule = self._rules.get(id(fn))
        if rule is not None:
            if self.outside.recorder.modes and fn in torch_functions.OVERRIDABLE:
                raise BreakGraph("ambient_state", f"{getattr(fn, '__qualname__', fn)}() under a function mode")
            return rule(fn, args, kwargs)
        kind = type(fn)
        if kind is types.FunctionType:
            return self._function(fn, args, kwargs)
        if kind is CompiledCallable:
            return Redirect(fn.function, args, kwargs)
        if kind is functools._lru_cache_wrapper:
            return self.caches.call(fn, args, kwargs)
        if kind in (torch._C.ScriptFunction, torch._C.ScriptMethod):
            if hasattr(fn, "_torchdynamo_inline"):
                return Redirect(fn._torchdynamo_inline, args, kwargs)  # the Python function that was scripted
            raise BreakGraph("c_function", f"call of {fn.name}, which TorchScript runs")
        if isinstance(kind.__call__, CompiledCallable):  # an object of a compiled class, or a compiled module
            found = self.outside.classes.get(kind, "__call__")
            if found is not None and isinstance(found[0], CompiledCallable):
                return Redirect(found[0].function, (fn, *args), kwargs)
        if isinstance(fn, nn.Module):
            return self._module_object(fn, args, kwargs)
        if kind.__call__ is weakref.ReferenceType.__call__ and not args and not kwargs:  # or a class of such
            return self.outside.referent(fn)
        if numpy_values.belongs(fn):
            return self._numpy(fn, args, kwargs)
        if kind in _BUILTINS:
            return self._builtin(fn, args, kwargs)
        if isinstance(fn, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
            if is_wait(fn):
                return wait(self.outside, functools.partial(self._native, fn, args, kwargs), args, kwargs)
            return packed_parameters.call(self.outside, self._native, fn, args, kwargs)
        if kind in TENSOR_METACLASSES:
            return self.overrides.makes(fn, args, kwargs)
        if isinstance(fn, torch._ops.HigherOrderOperator):
            if fn.__name__ == "invoke_subgraph" and len(args) > 1 and not kwargs:
                return self._nested_region(args[0], args[2:], kwargs)
            raise BreakGraph("higher_order_operator", f"call of torch.ops.higher_order.{fn.__name__}")
        return MISSING

    # -- Python functions -------------------------------------------------------------------

    def _function(self, fn: types.FunctionType, args: Args, kwargs: Kwargs) -> object:
        method = behind_patch(fn)
        if method is not None:
            return Redirect(method, args, kwargs)
        mark = mark_of(fn)
        if mark is not None:
            return self._marked(mark, fn, args, kwargs)
        if _INLINED in fn.__dict__:
            return Redirect(fn.__dict__[_INLINED], args, kwargs)
        if _REGION in fn.__dict__:
            return self._nested_region(fn.__dict__[_REGION], args, kwargs)
        module = torch_functions.home_of(fn)
        if fn in torch_calls.ANSWERS:
            return torch_calls.ANSWERS[fn]
        if (module, fn.__name__) in torch_calls.ANSWERS_BY_NAME:
            return torch_calls.ANSWERS_BY_NAME[module, fn.__name__]
        if writes(fn, module):
            return write_collective(self.outside, self.works, fn, args, kwargs)
        for room in (layout, masked.call):
            found = room(self.outside, fn, module, args, kwargs)
            if found is not MISSING:
                return found
        form = fn if lays_out(fn, module) else inlined(fn, module)
        if form is not None:
            self.outside.inline(form)
            return Redirect(form, args, kwargs) if form is not fn else MISSING
        if is_transformed(fn) or fn in self.transforms.pullbacks:
            self.interpreter.tail_call = False
            return self.transforms.call(fn, args, kwargs)
        if leaving.transforms(fn):
            raise BreakGraph("function_transform", f"call of {fn.__qualname__}")
        if fn.__code__ is _OPTIMIZER_STEP:
            return self._optimizer_step(fn, args, kwargs)
        if fn.__code__ is _NOT_FOR_COMPILERS and module.startswith("torch.optim"):
            return Redirect(fn.__dict__["__wrapped__"], args, kwargs)
        if module.startswith("numpy"):
            return self._numpy(fn, args, kwargs)
        if self.higher_order.takes(fn):
            return self.higher_order.call(fn, args, kwargs)
        if module == FUNCTIONAL and inlines(fn):
            named = with_group_named(self.outside, fn, args, kwargs)
            self.outside.inline(fn)
            return MISSING if named is None else Redirect(fn, named.args, named.kwargs)
        if is_interpreted(fn, kwargs):
            self.outside.inline(fn)
            return MISSING
        if is_method(fn, args):
            return self._native(fn, args, kwargs)
        self._break_if_listed(fn, module)
        if fn.__name__ == "__deepcopy__" and len(args) == 2 and isinstance(args[0], FakeTensor):
            return self._copied_tensor(*args)
        if module.startswith("primtorch.fake"):  # a method of the fake in the place of the tensor's
            if fn.__name__ == "numpy":
                return self.arrays.of_tensor(fn, args, kwargs)
            known = None if kwargs else constants.answer(fn.__name__, args)
            if known is not None:
                return known[0]
            if fn.__name__ in TAKING and len(args) == 1 and not kwargs:
                taken = self.outside.recorder.take_number(fn.__name__, args[0])
                if taken is not MISSING:
                    return taken
            reason = leaving.reason_of_name(fn.__name__, with_tensor=True)
            if reason is not None:
                raise BreakGraph(reason, f"{fn.__name__}() of a tensor")
            return self._native(fn, args, kwargs)
        if torch_functions.is_leaf(fn):
            self.outside.torch_names.of_leaf(fn)
            return self._native(fn, args, kwargs)
        if fn in torch_calls.NATIVE_FUNCTIONS:
            self.outside.examined(*args)
            return self._native(fn, args, kwargs)
        if fn in OTHER_FORMS:
            self.outside.inline(OTHER_FORMS[fn])
            return Redirect(OTHER_FORMS[fn], args, kwargs)
        asked = dispatched(self.world, fn, args, kwargs)
        if asked is not None:
            return Redirect(implementation, asked, {})
        self.outside.inline(fn)
        return MISSING

    def _other_form(self, fn: Callee, args: Args, kwargs: Kwargs) -> object:
        made = OF_OPERATORS[fn](args, kwargs)
        if made is not MISSING:
            return made
        return self._function(fn, args, kwargs) if type(fn) is types.FunctionType else self._builtin(fn, args, kwargs)

    def _marked(self, mark: Mark, fn: Callee, args: Args, kwargs: Kwargs) -> object:
        name = getattr(fn, "__qualname__", type(fn).__qualname__)
        self.outside.externals.unkept = f"{name} is marked"
        if mark.kind is MarkKind.ALLOWED:
            return self.outside.recorder.record_leaf(fn, args, kwargs)
        if mark.kind is MarkKind.SUBSTITUTED:
            assert isinstance(mark.substitute, types.FunctionType)
            self.outside.inline(mark.substitute)
            return Redirect(mark.substitute, args, kwargs)
        if mark.kind is not MarkKind.CONSTANT:
            raise BreakGraph("disabled", f"{name} is disabled" + (f": {mark.reason}" if mark.reason else ""))
        if tensors_in((args, kwargs)):
            raise BreakGraph("constant_result", f"{name} is called with a tensor")
        with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():  # type: ignore[attr-defined]
            result = fn(*scalars.concrete(args), **scalars.concrete(kwargs))
        return self.outside.externals.hold(result, name)

    def _builtin(self, fn: Callee, args: Args, kwargs: Kwargs) -> object:
        if args and isinstance(args[0], leaving.STATE_BLOCKS):
            return self._ambient(fn, args, kwargs)
        owner = getattr(fn, "__self__", None)
        if isinstance(owner, SWITCHES) and fn.__name__ in ("__enter__", "__exit__"):
            self.overrides.switch(fn.__name__)
            return None
        if isinstance(owner, torch.Generator):
            return self.random_state.method(owner, fn, args, kwargs)
        if isinstance(owner, torch.device) and fn.__name__ in ("__enter__", "__exit__"):
            return self.handle(getattr(torch.device, fn.__name__), (owner, *args), kwargs)
        if fn.__name__ == "as_subclass":
            return self.outside.recorder.as_subclass(*(args if owner is None else (owner, *args)), **kwargs)
        if fn.__name__ == "is_inference":
            return self._is_inference(fn, args, kwargs)
        if isinstance(owner, torch.Size) and fn.__name__ == "numel":
            return OF_OPERATORS[torch.Size.numel]((owner, *args), kwargs)
        if fn.__name__ in _METADATA_WRITES:
            if _changes_nothing(fn, args, kwargs):
                return owner if isinstance(owner, torch.Tensor) else args[0]
            self._refuse_metadata_write(fn, args)
        try:
            if fn in torch_calls.ANSWERS:
                return torch_calls.ANSWERS[fn]
        except TypeError:
            return MISSING
        method = getattr(torch.Tensor, fn.__name__, fn) if isinstance(owner, torch.Tensor) else fn
        if method is not fn:
            objects = torch_functions.passes_modes_by(method, (*args, *kwargs.values()))
            rule = self._native if objects else self._rules.get(id(method))
            if rule is not None:
                return rule(method, (owner, *args), kwargs)
        self._break_if_listed(method, getattr(fn, "__module__", None) or "")
        if isinstance(owner, contextvars.ContextVar):
            return self._context_variable(owner, fn, args)
        if isinstance(owner, functools._lru_cache_wrapper):
            return self.caches.method(owner, fn.__name__)
        if fn.__name__ == "apply" and isinstance(owner, type) and issubclass(owner, torch.autograd.Function):
            return self.autograd_functions.apply(owner, args, kwargs)
        if torch_functions.is_leaf(fn) and not self._changes_unseen(owner):
            operator = fn in torch_functions.OVERRIDABLE or not isinstance(owner, types.ModuleType)
            return (self._native if operator else self._watched)(fn, args, kwargs)
        return MISSING

    def _pickle(self, fn: Any, args: Args, kwargs: Kwargs) -> object:
        args = scalars.concrete(args)
        return fn(*args) if len(args) == 1 and not kwargs and torch_calls.pickles_by_value(args[0]) else MISSING

    def _changes_unseen(self, owner: object) -> bool:
        """Whether an object of torch's C code is the program's own, and what its methods say hangs on a state in it
        that nobody can guard: a storage, a stream, an event."""
        kept = (torch.Tensor, type, types.ModuleType)
        return not (isinstance(owner, kept) or is_constant(owner)) and self.outside.externals.lookup(owner) is not None

    def _refuse_metadata_write(self, fn: Callee, args: Args) -> None:
        """A graph has no place for it where it is an input's, and a back end may run on copies."""
        tensor = getattr(fn, "__self__", None)
        tensor = tensor if isinstance(tensor, torch.Tensor) else args[0] if args else None
        what = "an input" if self.outside.externals.lookup(tensor) is not None else "a tensor"
        if isinstance(tensor, torch.Tensor) and (what == "an input" or fn.__name__ in _SEEN_BY_NO_MODE):
            raise BreakGraph("tensor_metadata_write", f"{fn.__name__}() of {what}")

    def _context_variable(self, variable: contextvars.ContextVar[object], fn: Callee, args: Args) -> object:
        """`get` of a constant is guarded; what else is done with a variable of the context is done for real."""
        if fn.__name__ != "get":
            raise BreakGraph("ambient_state", f"{fn.__name__}() of the context variable {variable.name!r}")
        value = fn(*args) if is_constant(args) else None
        if not is_constant(value):
            raise BreakGraph("unsupported_read", f"what the context variable {variable.name!r} holds")
        return self.outside.ambient(fn, args)

    def _is_inference(self, fn: Any, args: Args, kwargs: Kwargs) -> object:
        """Of an input: as it was made, which its dispatch keys tell; its fake was made under the mode of the call."""
        known = self.outside.externals.lookup(args[0] if args else fn.__self__)
        if known is None or known.value is known.original or kwargs:
            return MISSING
        with torch._C.DisableTorchFunction():
            return known.original.is_inference()

    def _break_if_listed(self, fn: Callee, module: str) -> None:
        reason = leaving.reason_to_leave(fn, module)
        if reason is not None:
            name = getattr(fn, "__qualname__", str(fn))
            if name.startswith("pybind11_"):  # which puts a record of its own there
                name = fn.__name__
            raise BreakGraph(reason, f"call of {module}.{name}")

    def _native(self, fn: Callee, args: Args, kwargs: Kwargs) -> object:
        in_optimizer = hands_over_tensors(fn, self.interpreter.frames)
        if in_optimizer or torch_functions.passes_modes_by(fn, (*args, *kwargs.values())):
            with torch.overrides._pop_mode_temporarily() as recorder:  # type: ignore[attr-defined]
                return recorder.__torch_function__(fn, (), args, kwargs)
        return fn(*args, **kwargs)

    def _method_of_tensors(self, fn: Callee, args: Args, kwargs: Kwargs) -> object:
        return getattr(torch.Tensor, fn.__name__)(*args, **kwargs)  # the recorder runs the fake's in its place

    def _watched(self, fn: Callee, args: Args, kwargs: Kwargs) -> object:
        """A function of torch's C modules that is no operator. What it does to the ambient state is done for real."""
        before = ambient.snapshot()
        result = fn(*args, **kwargs)
        changes = ambient.changed(before)
        if changes:
            ambient.restore(before)
            raise BreakGraph("ambient_state", f"{fn.__name__}() changes {', '.join(changes)}")
        if not isinstance(result, torch.Tensor) and (result is not None or _is_question(fn)):
            note_answer(self.outside, fn, args, kwargs, result)
        return result

    def _lines(self, fn: Callee, args: Args, kwargs: Kwargs) -> object:
        """The text of a source file."""
        self.outside.externals.unkept = "the text of a source file is read"
        return fn(*args, **kwargs)

    def _choose_attention(self, fn: Callee, args: Args, kwargs: Kwargs) -> None:
        """Which kernels attention may take: for the calls behind this one, in the graph as in the program."""
        fn(*args, **kwargs)
        ambient.note(state for state in ambient.ATTENTION if state.write is fn)
        self.outside.recorder.write_node(fn, args).meta["effect"] = True

    def _globals(self, fn: Callee, args: Args, kwargs: Kwargs) -> object:
        if args or kwargs:
            return MISSING
        externals = self.outside.externals
        namespace = self.interpreter.frames[-1].function.__globals__
        return externals.namespace(namespace, externals.pins.source(namespace, "globals"))

    def _frame_reader(self, fn: Callee, args: Args, kwargs: Kwargs) -> object:
        """`eval` and `exec`. The functions that a class decorator of Python's library makes so stay with the class."""
        frame = self.interpreter.frames[-1]
        if frame.function.__globals__.get("__name__") in torch_calls.MAKERS_OF_CLASSES:
            return MISSING
        raise BreakGraph("frame_reader", f"call of {fn.__name__}()")

    def _import_module(self, fn: Callee, args: Args, kwargs: Kwargs) -> object:
        """`importlib.import_module(name, package)`: of what is loaded, the module itself."""
        given = inspect.signature(fn).bind(*args, **kwargs).arguments
        name, package = given["name"], given.get("package")
        level = len(name) - len(name.lstrip(".")) if isinstance(name, str) else 0
        module = imports.absolute_name(str(name)[level:], {"__package__": package}, level)
        if module is None or (imports.loaded(module) is None and imports.is_installed(module)):
            raise BreakGraph("import", f"importlib.import_module({name!r})")
        self._import(imports.BUILTIN, (module,), {})  # guards it, or raises
        externals = self.outside.externals
        return imports.read(externals, imports.loaded(module), str(module))  # type: ignore[arg-type]

    def _import(self, fn: Callee, args: Args, kwargs: Kwargs) -> object:
        given = dict(zip(("name", "globals", "locals", "fromlist", "level"), args, strict=False)) | kwargs
        name, namespace, fromlist, level = (
            given.get(key, default)
            for key, default in (("name", None), ("globals", None), ("fromlist", ()), ("level", 0))
        )
        if type(name) is not str or type(level) is not int or not is_constant(tuple(fromlist or ())):
            raise BreakGraph("import", f"__import__({name!r})")
        return self.world.import_by(namespace or {}, name, fromlist, level)

    def _is_compiling(self, fn: Callee, args: Args, kwargs: Kwargs) -> bool:
        return True

    def _graph_break(self, fn: Callee, args: Args, kwargs: Kwargs) -> object:
        raise BreakGraph("graph_break", "torchdynamo.graph_break()")

    def _region(self, fn: Callee, args: Args, kwargs: Kwargs) -> object:
        """The record of the calling thread: another thread's calls have another version of the function."""
        found = self.outside.ambient(region, ())
        return self.outside.externals.hold(found, "region")

    def _autograd_function(self, fn: Callee, args: Args, kwargs: Kwargs) -> object:
        return self.autograd_functions.apply(args[0], args[1:], kwargs)

    def _asks_for_overrides(self, fn: Callee, args: Args, kwargs: Kwargs) -> object:
        """Whether a torch function is overridden for its arguments: not by capture's own mode."""
        given = args[0] if fn is torch._C._has_torch_function and args else args
        if overriding(tuple(given), {}) and not self.outside.recorder.overrides_off:
            return True
        with self.outside.recorder.set_aside():
            return fn(*args, **kwargs)

    def _checkpoint(self, fn: Callee, args: Args, kwargs: Kwargs) -> object:
        self.interpreter.tail_call = False
        return call_checkpointed(self.outside, self.world, args, kwargs)

    def _nested_region(self, fn: Callee, args: Args, kwargs: Kwargs) -> object:
        self.interpreter.tail_call = False
        recorder = self.outside.recorder
        with recorder.nested.called(getattr(fn, "__qualname__", type(fn).__qualname__), recorder.user_frames()):
            return self.world.call(fn, args, kwargs)

    def _along(self, fn: Callee, args: Args, kwargs: Kwargs) -> object:
        self.interpreter.tail_call = False
        return getattr(self.transforms, fn.__name__)(*args, **kwargs)

    def _number(self, fn: Callee, args: Args, kwargs: Kwargs) -> object:
        """A builtin or a function of `math`: on symbols it gives a symbol."""
        if fn in (int, float) and len(args) == 1 and not kwargs and isinstance(args[0], FakeTensor):
            return getattr(args[0], f"__{fn.__name__}__")()  # C would not take a symbol from it
        if kwargs:
            return MISSING
        with self.outside.floats.looked_at(fn):
            return scalars.call(fn, args)

    def _assert_number(self, fn: object, args: Args, kwargs: Kwargs) -> object:
        """`torch._check` of what is known only when the program runs: the graph takes it for granted."""
        truth = args[0] if args else kwargs.get("cond")
        if fn is torch._check_is_size and isinstance(truth, torch.SymInt):
            truth = truth >= 0
        known = isinstance(truth, torch.SymBool) and self.outside.recorder.taken.check(truth)
        return None if known else MISSING

    def _tensor(self, fn: Callable[..., torch.Tensor], args: Args, kwargs: Kwargs) -> object:
        """`torch.tensor`, which would fix the numbers that it is given. A tensor of one int alone has its number fixed:
        such tensors stand for sizes, whose value the program asks for (`known_tensors.py`)."""
        if args and numpy_values.holds(args[0]):
            return self._tensor_of_array(fn, args, kwargs)
        made_of_symbols = len(args) == 1 and scalars.holds_symbol(args[0]) and scalars.only_numbers(args[0])
        if made_of_symbols and isinstance(args[0], torch.SymInt):
            args = (scalars.concrete(args[0]),)
            made_of_symbols = False
        if made_of_symbols and kwargs.keys() <= {"dtype", "device", "requires_grad"}:
            return scalars.tensor(args[0], **kwargs)
        if len(args) == 1 and type(args[0]) is OpenRange and kwargs.keys() <= {"dtype", "device"}:
            return typed_constructors.of_range(args[0], **kwargs)
        self.outside.refuse_opaque(*args)
        return self._native(fn, args, kwargs)

    def _tensor_of_array(self, fn: Callable[..., torch.Tensor], args: Args, kwargs: Kwargs) -> object:
        """A tensor of NumPy's numbers is a constant of the compiled code, copied at each call."""
        if not args or not numpy_values.holds(args[0]):
            return self._tensor(fn, args, kwargs) if args and type(args[0]) is OpenRange else MISSING
        arrays, data = self.outside.externals.arrays, scalars.concrete(args[0])
        shares = fn in numpy_values.MAKERS or fn in torch_calls.TENSOR_TYPES
        if shares and numpy_values.is_array(data) and arrays.is_known(data):
            self.outside.arrays.forget(data)  # what is written to the tensor, or to the array, changes both
            return self.arrays.handle(fn, args, kwargs)
        if len(args) > 1 or kwargs.keys() - {"dtype", "device", "requires_grad"} or not arrays.is_known(data):
            raise BreakGraph("numpy", f"torch.{fn.__name__} of an array that capture does not know")
        tensor = self.outside.adopt(arrays.tensor(fn, data)).clone()
        wanted = {key: kwargs[key] for key in ("dtype", "device") if kwargs.get(key) is not None}
        tensor = tensor.to(**wanted) if wanted else tensor
        return tensor.requires_grad_() if kwargs.get("requires_grad") else tensor

    def _of_buffer(self, fn: Callee, args: Args, kwargs: Kwargs) -> object:
        self.outside.refuse_opaque(*args, *kwargs.values())  # its memory would be the constant's
        return self._builtin(fn, args, kwargs)

    def _array_of_tensor(self, fn: Callee, args: Args, kwargs: Kwargs) -> object:
        return self.arrays.of_tensor(fn, args, kwargs)

    def _tensor_of_type(self, fn: Any, args: Args, kwargs: Kwargs) -> object:
        if args and numpy_values.holds(args[0]):
            return self._tensor_of_array(fn, args, kwargs)
        return typed_constructors.call(fn, args, kwargs, self._tensor)

    def _variable(self, fn: Callee, args: Args, kwargs: Kwargs) -> object:
        """`Variable(tensor)`: what is left of it takes the tensor out of its history."""
        if len(args) != 1 or not isinstance(args[0], torch.Tensor) or kwargs.keys() - {"requires_grad"}:
            raise BreakGraph("c_function", "call of torch.autograd.Variable with more than a tensor")
        tensor = args[0].detach()
        return tensor.requires_grad_() if kwargs.get("requires_grad") else tensor

    def _numpy(self, fn: Callee, args: Args, kwargs: Kwargs) -> object:
        args, kwargs = scalars.concrete(args), scalars.concrete(kwargs)
        if tensors_in((args, kwargs)):
            left = numpy_values.leaves_to_tensors(fn, args)
            return NotImplemented if left else self.outside.arrays.call(fn, args, kwargs)
        if not self.outside.externals.arrays.runs(fn, args, kwargs):
            name = getattr(fn, "__qualname__", getattr(fn, "__name__", type(fn).__name__))
            raise BreakGraph("numpy", f"call of {getattr(fn, '__module__', None) or 'numpy'}.{name}")
        return fn(*args, **kwargs)

    def _optimizer_step(self, fn: types.FunctionType, args: Args, kwargs: Kwargs) -> object:
        """`step` without the graph breaks around it that torch puts there for another compiler."""
        self.interpreter.tail_call = False
        enabled = torch.is_grad_enabled()
        defaults: Any = self.world.getattr(args[0], "defaults")
        torch._C._set_grad_enabled(defaults["differentiable"])
        try:
            return self.world.call(fn.__dict__["__wrapped__"], args, kwargs)
        finally:
            torch._C._set_grad_enabled(enabled)

    def _derivative(self, fn: Callee, args: Args, kwargs: Kwargs) -> object:
        """Derivatives by autograd's engine: in the graph where all that it runs through is there."""
        self.interpreter.tail_call = False
        try:
            return _ENGINE_CALLS[fn](self.engine, fn, args, kwargs)
        except BreakGraph as error:
            given = inspect.signature(fn).bind_partial(*args, **kwargs).arguments.get("inputs")
            self.outside.recorder.derive(given)
            if error.reason != "backward":
                raise
            raise BreakGraph("backward", f"{fn.__qualname__}(): {error.detail}") from error

    def _unfused(self, fn: Callee, args: Args, kwargs: Kwargs) -> object:
        return Redirect(loop_for(fn, args, kwargs), args, kwargs)

    def _of_scalers(self, fn: Callee, args: Args, kwargs: Kwargs) -> object:
        return OF_SCALERS[fn](*args) if not kwargs else MISSING

    def _step_count(self, fn: Callee, args: Args, kwargs: Kwargs) -> object:
        """An optimizer's step count for its corrections: double precision, as the Python numbers that eager takes."""
        count = args[0]
        return count.to(torch.float64) if isinstance(count, torch.Tensor) and count.is_floating_point() else count

    def _type(self, fn: Callee, args: Args, kwargs: Kwargs) -> object:
        if len(args) != 1 or kwargs:
            return MISSING
        return self.outside.type_of(args[0])

    def _id(self, fn: Callee, args: Args, kwargs: Kwargs) -> object:
        frames = self.outside.user_frames()
        if len(args) != 1 or kwargs or (frames and frames[-1].file == copy.__file__):  # the memo of a deep copy
            return MISSING
        return self.outside.identity(args[0])

    def _text(self, fn: Callable[[object], str], args: Args, kwargs: Kwargs) -> object:
        """The text of a run-time number, which is fixed by it, or of an exception of the outside."""
        if len(args) != 1 or kwargs:
            return MISSING
        if isinstance(args[0], SYMBOLIC):
            return fn(scalars.concrete(args[0]))
        return self.outside.text_of_exception(fn, args[0]) if isinstance(args[0], BaseException) else MISSING

    def _dir(self, fn: Callee, args: Args, kwargs: Kwargs) -> object:
        """The names of an object's attributes: those that the program has set itself included."""
        if len(args) != 1 or kwargs:
            return MISSING
        obj = args[0]
        if isinstance(obj, SYMBOLIC):
            return dir(self.outside.type_of(obj))
        if isinstance(obj, torch.Tensor):
            raise BreakGraph("unsupported_read", "dir() of a tensor")
        if isinstance(obj, (type, types.ModuleType)):
            if self.outside.overlays.names(obj):
                raise BreakGraph("unsupported_read", f"dir() of {obj.__name__}, which the program has changed")
            own = isinstance(obj, type) and obj in self.outside.classes.made
            return dir(obj) if own else self.outside.ambient(dir, args)
        method = python_method(type(obj), "__dir__")
        if method is not None:
            return self.world.call(sorted, (self.world.call(method, args, {}),), {})
        own_way: object = type(obj).__dir__
        if own_way is not object.__dir__ or own_dict(obj) is None:
            return MISSING
        return sorted({*self.outside.instance_dict(obj), *self._dir(fn, (type(obj),), {})})

    def _deep_copy(self, fn: types.FunctionType, args: Args, kwargs: Kwargs) -> object:
        """Whole or not at all: its memo knows objects by identities that hold during capture alone."""
        self.interpreter.tail_call = False
        return self.interpreter.call_function(fn, args, kwargs)

    def _copied_tensor(self, tensor: FakeTensor, memo: dict[int, object]) -> torch.Tensor:
        """A deep copy of a tensor that has its memory to itself, and nothing besides its values."""
        known = self.outside.externals.lookup(tensor)
        original = tensor if known is None else known.original
        plain = self.outside.type_of(tensor) is torch.Tensor and self.world.getattr(tensor, "grad") is None
        before = any(one is memo and memory is tensor.memory for one, memory in self.copied)
        shared = before or original._base is not None
        if not plain or shared or (tensor.requires_grad and not tensor.is_leaf) or self.outside.stored_names(tensor):
            raise BreakGraph("tensor_to_number", "copy.deepcopy() of a tensor that is more than its values")
        self.copied.append((memo, tensor.memory))
        copied = tensor.detach().clone()
        memo[id(tensor)] = copied.requires_grad_(tensor.requires_grad)
        return copied

    def _ambient_read(self, fn: Callee, args: Args, kwargs: Kwargs) -> object:
        return MISSING if kwargs else self.outside.ambient(fn, args)

    def _asks_for_grad_mode(self, fn: Callee, args: Args, kwargs: Kwargs) -> object:
        self.autograd_functions.asked += 1
        return MISSING

    def _isinstance(self, fn: Callee, args: Args, kwargs: Kwargs) -> object:
        """A symbol is what its value would be; the interpreter's own rule answers for all else."""
        if kwargs or len(args) != 2:
            return MISSING
        if isinstance(args[0], FakeTensor) and class_of(args[0]) is not None:
            return is_instance(args[0], args[1])
        if not isinstance(args[0], (*SYMBOLIC, RunTimeText)):
            return MISSING
        kind = self.outside.type_of(args[0])
        return Redirect(isinstance, (kind(), args[1]), {})

    # -- modules ----------------------------------------------------------------------------

    def _module(self, fn: Callee | None, args: Args, kwargs: Kwargs) -> object:
        """`nn.Module.__call__(module, ...)`, spelt out by the program or found along the MRO."""
        module = args[0]
        within = self.outside.classes.get(type(module), "_call_impl")
        if fn is not _CALL_IMPL and within is not None and within[0] is not _CALL_IMPL:
            return Redirect(within[0], args, kwargs)
        if self.outside.has_plain_call(module):
            return Redirect(self.outside.forward_of(module), args[1:], kwargs)
        if self.outside.has_backward_hooks(module):
            raise BreakGraph("module_hook", f"call of a {type(module).__qualname__} with backward hooks")
        if fn is _CALL_IMPL:
            return MISSING
        # Interpreted in place of `_wrapped_call_impl`, which looks whether another compiler has the module.
        return self.interpreter.call_function(_CALL_IMPL, args, kwargs)

    def _module_object(self, module: nn.Module, args: Args, kwargs: Kwargs) -> object:
        mark = mark_of(module)
        if mark is not None:
            return self._marked(mark, module, args, kwargs)
        found = self.outside.classes.get(type(module), "__call__")
        if found is None or found[0] is not _MODULE_CALL:
            return MISSING
        return self._module(None, (module, *args), kwargs)

    def _ambient(self, fn: Callee, args: Args, kwargs: Kwargs) -> object:
        raise BreakGraph("ambient_state", f"call of {getattr(fn, '__qualname__', fn)}")


# The text of source files, which tracebacks show, is no state of the program; each compilation adds to its cache.
_LINES_OF_SOURCE = (
    linecache.checkcache, linecache.getline, linecache.getlines, linecache.lazycache, linecache.updatecache,
)  # fmt: skip
# Methods that exchange a tensor's memory, and that torch shows to no mode where they have no argument.
_SEEN_BY_NO_MODE = frozenset({"set_"})
# Methods that change what autograd knows of a tensor, in place; of tensors that the program made, graphs hold them.
_METADATA_WRITES = frozenset({"requires_grad_", "detach_"}) | _SEEN_BY_NO_MODE


def _is_question(fn: Callee) -> bool:
    """Whether None is the answer of a function of C, and not that of one which is called for what it does."""
    return str(fn.__name__).lstrip("_").startswith(("get", "is", "has", "current"))


def _changes_nothing(fn: Callee, args: Args, kwargs: Kwargs) -> bool:
    """`requires_grad_` of what a tensor is: of all tensors without a history, for False, and of all that have one."""
    owner = getattr(fn, "__self__", None)
    given = (owner, *args) if isinstance(owner, torch.Tensor) else args
    if fn.__name__ != "requires_grad_" or kwargs or len(given) != 2 or not isinstance(given[0], torch.Tensor):
        return False
    return type(given[1]) is bool and given[1] is given[0].requires_grad


# Torch's decorators of optimizers: their code is the same for all that they wrap.
_OPTIMIZER_STEP = optimizer._use_grad_for_differentiable(lambda self: None).__code__
# `torch.autograd.Function.apply`: a classmethod in Python, until torch 2.14 made it one in C, which `_builtin` knows.
_PYTHON_APPLY = tuple(filter(None, [getattr(torch.autograd.Function.apply, "__func__", None)]))
_ASKS_FOR_OVERRIDES = (
    torch._C._has_torch_function,
    torch._C._has_torch_function_unary,
    torch._C._has_torch_function_variadic,
)
# Where torch keeps the function as written: behind what torch.compile and nested_compile_region made of it.
_INLINED, _REGION = "_torchdynamo_inline", "__marked_compile_region_fn__"
_NOT_FOR_COMPILERS = torch._compile._disable_dynamo(lambda: None).__code__


_ENGINE_CALLS: Mapping[Callee, Callable[[Engine, Callee, Args, Kwargs], object]] = {
    torch.autograd.grad: Engine.grad,
    torch.autograd.backward: Engine.backward,
    torch.Tensor.backward: Engine.method,
}


# Functions as torch and Python have them: what a program puts in the place of one is a function like any other.
_RULES: tuple[tuple[object, Callable[..., object]], ...] = (
    (type, Calls._type),
    (globals, Calls._globals),
    *((function, Calls._frame_reader) for function in torch_calls.FRAME_READERS),
    (importlib.import_module, Calls._import_module),
    (imports.BUILTIN, Calls._import),
    (isinstance, Calls._isinstance),
    (id, Calls._id),
    (dir, Calls._dir),
    (str, Calls._text),
    (repr, Calls._text),
    (copy.deepcopy, Calls._deep_copy),
    *((method, Calls._method_of_tensors) for method in METHODS_OF_FAKES.values()),
    *((function, Calls._lines) for function in _LINES_OF_SOURCE),
    *((function, Calls._ambient_read) for function in torch_calls.AMBIENT_READS),
    *((block, Calls._ambient) for block in leaving.STATE_BLOCKS),
    *((function, Calls._autograd_function) for function in _PYTHON_APPLY),
    *((function, Calls._asks_for_overrides) for function in _ASKS_FOR_OVERRIDES),
    (torch.utils.checkpoint.checkpoint, Calls._checkpoint),
    *((transform, Calls._along) for transform in (torch.func.jvp, torch.func.vjp, torch.func.linearize)),
    *((maker, Calls._native) for maker in MAKERS),
    (_ProfilerRange.__init__, Calls._native),
    (optimizer._get_value, Calls._step_count),
    *((function, Calls._derivative) for function in _ENGINE_CALLS),
    *((fused, Calls._unfused) for fused in LOOPS),
    *((operator, Calls._of_scalers) for operator in OF_SCALERS),
    (graph_break, Calls._graph_break),
    (region, Calls._region),
    (is_compiling, Calls._is_compiling),
    (nn.Module.__call__, Calls._module),
    (nn.Module._wrapped_call_impl, Calls._module),
    (nn.Module._call_impl, Calls._module),
    (torch.autocast, Calls._native),
    (torch._C._set_grad_enabled, Calls._native),
    (torch.is_grad_enabled, Calls._asks_for_grad_mode),
    *((state.write, Calls._choose_attention) for state in ambient.ATTENTION),
    (torch.tensor, Calls._tensor),
    (torch.frombuffer, Calls._of_buffer),
    (torch.Tensor.numpy, Calls._array_of_tensor),
    (torch.Tensor.__array__, Calls._array_of_tensor),
    *((function, Calls._tensor_of_array) for function in numpy_values.MAKERS),
    *((kind, Calls._tensor_of_type) for kind in torch_calls.TENSOR_TYPES),
    (torch.autograd.Variable, Calls._variable),
    *((switch, Calls._native) for switch in SWITCHES),
    *((function, Calls._number) for function in (*scalars.NUMBER_FUNCTIONS, int, float)),
    (torch._check, Calls._assert_number),
    *((operator, Calls._other_form) for operator in OF_OPERATORS),
    (torch._check_is_size, Calls._assert_number),
    (pickle.dumps, Calls._pickle),
)
_MODULE_CALL: object = nn.Module.__call__
_CALL_IMPL = nn.Module.__dict__["_call_impl"]
_BUILTINS = (
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    types.MethodWrapperType,
)
