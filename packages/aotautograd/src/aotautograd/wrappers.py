"""Programs over tensors that wrap others (`primtorch.wrappers`).

Autograd is above `__torch_dispatch__`: a gradient is that of the wrapper, computed by operators on wrappers. So the
joint graph is traced as if a wrapper were any tensor of its metadata, and cut. Only then each part is *taken apart*:
its nodes run on tensors of the class around fakes, and the operators that the class makes of them, on plain tensors,
are the graph that is lowered and compiled. Around it, inputs are taken apart and results put together.
"""

from __future__ import annotations

import copy
import itertools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch.autograd.function import BackwardCFunction, FunctionCtx
from torch.fx.node import Argument
from torch.masked import MaskedTensor
from torch.utils import _pytree as pytree

from aotautograd.compilers import Compilers
from aotautograd.errors import AotAutogradError, UnsupportedMutation
from aotautograd.lowering import Lowering
from aotautograd.passes import eliminate_common_subexpressions, eliminate_dead_code, output_values, remove_no_ops
from aotautograd.schemas import PHASE, Compiled, Compiler, Dump, Values
from primtorch import graph_text
from primtorch.dispatch_mode import DispatchMode
from primtorch.fake import FakeMode, FakeTensor, propagate
from primtorch.fake.tensor import register_special
from primtorch.flattenings import masks_differ, matching, unwarned
from primtorch.frozen import record
from primtorch.memory import memory_of
from primtorch.printing import made_by
from primtorch.spec import Size, TensorSpec
from primtorch.symbolic import expr_of, materialize
from primtorch.wrappers import Applied, NotTakenApart, Relaid, Template, is_wrapper, whole_of, wrappers_in

# A wrapper that the program makes, and a part that it reads of one, in graphs over wrappers. `call` says which.
_LIBRARY = torch.library.Library("aotautograd_wrappers", "DEF")
_LIBRARY.define("make(Tensor[] parts, int call) -> Tensor")
_LIBRARY.define("part(Tensor whole, int call) -> Tensor")
_LIBRARY.define("relay(Tensor tensor, int call) -> Tensor")
for _name in ("make", "part", "relay"):
    _LIBRARY.impl(_name, torch.library.fallthrough_kernel, "Autograd")
MAKE: OpOverload = torch.ops.aotautograd_wrappers.make.default
PART: OpOverload = torch.ops.aotautograd_wrappers.part.default
RELAY: OpOverload = torch.ops.aotautograd_wrappers.relay.default  # a `Relaid`, or its derivative


_IN_FLIGHT = "_c10d_functional::_wrap_tensor_autograd"  # a tensor that waits where it is used: a graph waits at once


@dataclass(frozen=True)
class _Call:
    """What one of these operators does: to tensors of the classes, and to a fake of the result's metadata."""

    run: Callable[[Any], object]  # of the parts, or of the whole
    spec: TensorSpec
    rehearse: Callable[[Any], None] | None = None  # what is done before, of which nothing is recorded


_CALLS: dict[int, _Call] = {}
_NUMBERS = itertools.count()
register_special(MAKE, lambda mode, parts, call: mode.from_spec(_CALLS[call].spec))
register_special(PART, lambda mode, whole, call: mode.from_spec(_CALLS[call].spec))
register_special(RELAY, lambda mode, tensor, call: mode.from_spec(_CALLS[call].spec))


class _Directions(FunctionCtx):
    """What is kept of a relaying: the numbers of the calls there and back."""

    there: int
    back: int


class _Relaying(torch.autograd.Function):
    """Another layout, and in the derivative the way back."""

    @staticmethod
    def forward(ctx: _Directions, tensor: torch.Tensor, there: int, back: int) -> torch.Tensor:
        ctx.there, ctx.back = there, back
        return RELAY(tensor, there)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: _Directions, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _relaying(gradients[0], ctx.back, ctx.there), None, None


def _relaying(tensor: torch.Tensor, there: int, back: int) -> torch.Tensor:
    return _Relaying.apply(tensor, there, back)  # type: ignore[no-any-return, no-untyped-call]


class _Operands(BackwardCFunction):
    """What is kept of an `Applied`: the numbers of the calls by which gradients of its operands are computed."""

    backs: tuple[int | None, ...]


class _Applying(torch.autograd.Function):
    """A function of wrappers that is no operator, whose derivative is that of what it is made of."""

    @staticmethod
    def forward(ctx: _Operands, there: int, backs: tuple[int | None, ...], *tensors: torch.Tensor) -> torch.Tensor:
        ctx.backs = backs
        ctx.save_for_backward(*tensors)
        return MAKE(list(tensors), there)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: _Operands, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        given = [*ctx.saved_tensors, gradients[0]]
        needed: Iterator[tuple[int | None, bool]] = zip(ctx.backs, ctx.needs_input_grad[2:], strict=True)
        return (None, None, *(MAKE(given, back) if needs and back is not None else None for back, needs in needed))


def _applying(there: int, backs: tuple[int | None, ...], *tensors: torch.Tensor) -> torch.Tensor:
    return _Applying.apply(there, backs, *tensors)  # type: ignore[no-any-return, no-untyped-call]


_applying.no_second_derivative = (  # type: ignore[attr-defined]
    "it is one of tensors that wrap others, made of functions of their class"
)


class _Back:
    """The gradient of one operand of an `Applied`, by autograd: the function is run again, and what its derivative does
    is recorded with it: what it reads of the forward's values is computed again."""

    def __init__(self, call: Applied, place: int) -> None:
        self.call = call
        self.place = place

    def __call__(self, given: Sequence[torch.Tensor]) -> torch.Tensor:
        *operands, gradient = given
        with torch.enable_grad(), torch.autograd.set_multithreading_enabled(False):
            begins = [tensor.detach() for tensor in operands]
            begins[self.place].requires_grad_()
            end = self.call(*begins)
        return torch.autograd.grad(end, begins[self.place], gradient)[0]


class _WayBack:
    """The derivative of another layout, by autograd: the function is run of a tensor of the same layout, unrecorded."""

    def __init__(self, call: Relaid, given: torch.Tensor) -> None:
        whole = whole_of(given)
        self.call = call
        self.template = TensorSpec.of(given) if whole is None else _template(whole)
        self.ends: tuple[torch.Tensor, torch.Tensor] | None = None

    def rehearse(self, gradient: torch.Tensor) -> None:
        template, mode = self.template, _mode_of(gradient)
        with torch.enable_grad():
            if isinstance(template, TensorSpec):
                begin: torch.Tensor = mode.from_spec(template)
            else:
                begin = template.build(mode.from_spec(spec) for spec in template.specs())
            begin = begin.detach().requires_grad_()
            self.ends = begin, self.call(begin)

    def run(self, gradient: torch.Tensor) -> torch.Tensor:
        assert self.ends is not None
        (begin, end), self.ends = self.ends, None
        return torch.autograd.grad(end, begin, gradient)[0]


def _mode_of(tensor: torch.Tensor) -> FakeMode:
    inner: Any = next(_template(tensor).flatten(tensor)) if is_wrapper(type(tensor)) else tensor
    mode: FakeMode = inner.fake_mode
    return mode


class WrapperProgram:
    """A captured program with wrappers among its values; with `arriving`, of which nobody knows what its inputs are."""

    def __init__(
        self, program: fx.GraphModule, lowering: Lowering | None, dump: Dump | None, arriving: bool = False
    ) -> None:
        self.lowering = lowering
        self.dump = dump
        self.templates: dict[str, Template | None] = {}
        masks_differ()  # asked outside of modes
        self._calls: list[int] = []
        self.module: fx.GraphModule = self._over_wrappers(program)
        for node in () if arriving else self.module.graph.find_nodes(op="placeholder"):
            value = node.meta.get("val")
            whole = whole_of(value) if isinstance(value, torch.Tensor) else None
            self.templates[node.name] = None if whole is None else _template(whole)

    def __del__(self) -> None:
        for call in self._calls:
            _CALLS.pop(call, None)

    def _over_wrappers(self, module: Any) -> Any:
        """The module with its graph, and those of modules in it, in terms of the operators above."""
        made = copy.copy(module)
        made._modules = {name: self._over_wrappers(inner) for name, inner in module._modules.items()}
        if not isinstance(module, fx.GraphModule):
            return made
        rewritten = fx.GraphModule(made, self._rewritten(module.graph), type(module).__name__)
        rewritten.meta.update(module.meta)
        return rewritten

    def _rewritten(self, source: fx.Graph) -> fx.Graph:
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        for node in source.nodes:
            copies[node] = graph.node_copy(node, copies.__getitem__)
            if node.op == "call_function":
                with graph.inserting_after(copies[node]):
                    call = self._of_wrapper(graph, copies[node])
                if call is not None:
                    call.meta = dict(node.meta)
                    graph.erase_node(copies[node])
                    copies[node] = call
        return graph

    def _of_wrapper(self, graph: fx.Graph, node: fx.Node) -> fx.Node | None:
        if isinstance(node.target, Relaid):
            (given,) = node.args
            assert isinstance(given, fx.Node)
            back = _WayBack(node.target, given.meta["val"])
            there = self._call(node.target, node)
            number = self._call(back.run, given, back.rehearse)
            return graph.call_function(_relaying, (given, there, number))
        if isinstance(node.target, Applied):
            return self._of_applied(graph, node, node.target)
        if isinstance(node.target, type) and is_wrapper(node.target):
            leaves, structure = pytree.tree_flatten((node.args, dict(node.kwargs)))
            places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, fx.Node)]
            kind, constants = node.target, [None if i in places else leaf for i, leaf in enumerate(leaves)]

            def make(parts: Sequence[object]) -> object:
                filled = list(constants)
                for place, part in zip(places, parts, strict=True):
                    filled[place] = part
                args, kwargs = pytree.tree_unflatten(filled, structure)
                return kind(*args, **kwargs)

            return graph.call_function(MAKE, ([leaves[i] for i in places], self._call(make, node)))
        owner = node.args[0].meta.get("val") if node.args and isinstance(node.args[0], fx.Node) else None
        if node.target is not getattr or not isinstance(owner, torch.Tensor) or whole_of(owner) is None:
            return None
        name = str(node.args[1])
        if hasattr(torch.Tensor, name):
            return None
        return graph.call_function(PART, (node.args[0], self._call(operator.attrgetter(name), node)))

    def _of_applied(self, graph: fx.Graph, node: fx.Node, target: Applied) -> fx.Node:
        operands = [operand for operand in node.args if isinstance(operand, fx.Node)]
        there = self._call(lambda tensors: target(*tensors), node)
        if not node.meta["val"].requires_grad:  # an index, say, whatever the operands are
            return graph.call_function(MAKE, (operands, there))
        backs = tuple(
            self._call(_Back(target, place), operand) if operand.meta["val"].dtype.is_floating_point else None
            for place, operand in enumerate(operands)
        )
        return graph.call_function(_applying, (there, backs, *operands))

    def _call(self, run: Callable[[Any], object], node: fx.Node, rehearse: Callable[[Any], None] | None = None) -> int:
        number = next(_NUMBERS)
        _CALLS[number] = _Call(run, TensorSpec.of(node.meta["val"]), rehearse)
        self._calls.append(number)
        return number

    def compilers(self, plain: Compilers) -> Compilers:
        """Compilers of the program's graphs: each takes its graph apart, and lowers what comes of it."""
        forward, backward, inference = map(self.compiler, (plain.forward, plain.backward, plain.inference))
        halves = replace(plain, forward=forward, backward=backward, inference=inference)
        return replace(halves, lowering=None, stages=(), shelf=None, of_wrappers=True)

    def compiler(self, compile: Compiler) -> Compiler:
        """A compiler of graphs over wrappers. The templates of their inputs are the program's, or those of what its
        forward gave; of other inputs, which are gradients, each call tells, and one with other wrappers has another
        graph."""

        def compile_apart(module: fx.GraphModule, examples: list[object]) -> Compiled:
            apart = TakenApart(self, module, compile)
            if all(type(template) is not _Arriving for template in apart.templates):
                templates = [t for t in apart.templates if not isinstance(t, _Arriving)]
                apart.given = templates, apart.variant(templates)
            return apart

        return compile_apart

    def template(self, node: fx.Node) -> Template | _Arriving | None:
        """What is known of an input of one of the program's graphs: how a wrapper is made, None for other values."""
        value = node.meta.get("val")
        if node.name in self.templates or not isinstance(value, (torch.Tensor, TensorSpec)):
            return self.templates.get(node.name)
        return _Arriving(value if isinstance(value, TensorSpec) else TensorSpec.of(value))


@record
class _Arriving:
    """An input of which each call tells whether it is a wrapper, and how it is made. `spec`: what it was taken for."""

    spec: TensorSpec

    def template(self, value: object) -> Template | None:
        """How the wrapper is made that came; with the sizes that the graph has, where these vary."""
        if not is_wrapper(type(value)):
            return None
        template = _template(value)
        varies = any(type(size) is not int for size in self.spec.shape)
        return template.sized(self.spec) if varies and template.elementwise() else template


class TakenApart:
    """A compiled graph over wrappers: one graph of plain tensors for each kind of wrappers that come."""

    def __init__(self, program: WrapperProgram, module: fx.GraphModule, compile: Compiler) -> None:
        self.program = program  # whose operators the graph calls
        self.module = module
        self.compile = compile
        self.templates = [program.template(node) for node in module.graph.find_nodes(op="placeholder")]
        self.variants: list[tuple[list[Template | None], _Variant]] = []
        self.given: tuple[list[Template | None], _Variant] | None = None  # of inputs that are all known

    def variant(self, templates: list[Template | None]) -> _Variant:
        """The graph of plain tensors for wrappers of these kinds (None: no wrapper), compiled where they are new."""
        for known, variant in self.variants:
            if known == templates:
                return variant
        variant = take_apart(self.module, templates, self.program, self.compile)
        self.variants.append((templates, variant))
        return variant

    def __call__(self, *inputs: object) -> Sequence[object]:
        with torch._C.DisableTorchFunctionSubclass():
            try:
                return self._run(inputs)
            except RuntimeError as error:
                if masks_differ() in str(error):
                    raise ValueError(masks_differ()) from error
                raise

    def _run(self, inputs: Values) -> Values:
        if self.given is not None:
            templates, variant = self.given
        else:
            places = zip(self.templates, inputs, strict=True)
            templates = [t.template(value) if isinstance(t, _Arriving) else t for t, value in places]
            variant = self.variant(templates)
        flat: list[torch.Tensor] = []
        for value, template, known in zip(inputs, templates, self.templates, strict=True):
            if template is None:
                flat.append(value)
                continue
            parts = template.flatten(value)
            flat += (part.contiguous() for part in parts) if known is not template and template.symbolic() else parts
        results = variant(list(flat))
        plain = iter([results[place] if source == "result" else flat[place] for source, place in variant.sources])
        return [inputs[made] if type(made) is int else _made(made, plain) for made in variant.outputs]


@dataclass(frozen=True)
class _Variant:
    """A graph of plain tensors, compiled.

    Attributes:
        sources: for each plain tensor of the outputs, whether it is a result of the graph or an input, and its place.
        outputs: the template of each output that is a wrapper, or the place of the input that it is.
    """

    compiled: Compiled
    sources: tuple[tuple[str, int], ...]
    outputs: tuple[Template | int | None, ...]

    def __call__(self, inputs: list[object]) -> Values:
        return self.compiled(inputs) if getattr(self.compiled, "_boxed_call", False) else self.compiled(*inputs)


def _made(template: Template | int | None, plain: Iterator[torch.Tensor]) -> object:
    return template.build(plain) if isinstance(template, Template) else next(plain)


def _template(tensor: object) -> Template:
    try:
        return Template.of(tensor)
    except NotTakenApart as error:
        raise AotAutogradError(str(error), ()) from error


def take_apart(
    module: fx.GraphModule, templates: Sequence[Template | None], program: WrapperProgram, compile: Compiler
) -> _Variant:
    """The graph of what the classes make of a graph over wrappers, compiled."""
    apart = _Apart(module, templates)
    with torch.no_grad(), torch._C._DisableAutocast(), torch._C.DisableTorchFunctionSubclass():
        outputs = apart.run()
    flat: list[object] = []
    kinds: list[Template | int | None] = []
    for name, value in zip(apart.names, outputs, strict=True):
        if isinstance(value, torch.Tensor) and name:  # the backward may read it
            program.templates[name] = _template(value) if is_wrapper(type(value)) else None
        if id(value) in apart.wholes:
            kinds.append(apart.wholes[id(value)])
            continue
        template = _template(value) if is_wrapper(type(value)) else None
        kinds.append(template)
        flat += [value] if template is None else template.flatten(value)
        if template is not None and template.symbolic() and not template.elementwise():
            raise AotAutogradError(f"a {template.kind.__qualname__} has a size that varies", ())
    sources: list[tuple[str, int]] = []
    results: dict[Argument, int] = {}
    placeholders = {node: i for i, node in enumerate(n for n in apart.graph.nodes if n.op == "placeholder")}
    for value in flat:
        node = apart.lift(value)
        if isinstance(node, fx.Node) and node in placeholders:
            sources.append(("input", placeholders[node]))
            continue
        if isinstance(node, fx.Node) and any(isinstance(made, Template) for made in kinds):
            node = apart.owned(node)
        sources.append(("result", results.setdefault(node, len(results))))
    apart.graph.output(tuple(results))
    graph = fx.GraphModule(module, apart.graph, type(module).__name__)
    made_by(graph, "take_apart", module)
    graph = _lowered(graph, program)
    examples = [node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder"]
    return _Variant(compile(graph, examples), tuple(sources), tuple(kinds))


def _lowered(module: fx.GraphModule, program: WrapperProgram) -> fx.GraphModule:
    """The plain graph, cleaned and in the compilers' set of operators."""

    def simplify(gm: fx.GraphModule) -> None:
        eliminate_dead_code(gm.graph)
        remove_no_ops(gm.graph, output_values(gm.graph))
        eliminate_common_subexpressions(gm.graph, output_values(gm.graph))
        gm.recompile()

    simplify(module)
    if program.dump is not None:
        program.dump("taken_apart.py", graph_text(module, "taken_apart"))
    if program.lowering is None:
        return module
    lowered = program.lowering.of(module, [True] * len(output_values(module.graph)))
    program.lowering.verify(lowered)
    simplify(lowered)
    return lowered


class _Apart(DispatchMode):
    """Runs a graph over wrappers. What arrives of it at plain tensors is the new graph."""

    def __init__(self, module: fx.GraphModule, templates: Sequence[Template | None]) -> None:
        self.module = module
        self.graph = fx.Graph()
        self.node_of: dict[int, fx.Node] = {}
        self.symbols: dict[str, fx.Node] = {}
        self.alive: list[object] = []
        self.meta: dict[str, Any] = {}
        fakes = (n.meta["val"] for n in module.graph.nodes if isinstance(n.meta.get("val"), FakeTensor))
        first = next(fakes, None)
        self.mode = first.fake_mode if first is not None else FakeMode()
        self.templates = iter(templates)
        self.values: dict[fx.Node, Any] = {}
        self.wholes: dict[int, int] = {}  # the places of inputs that are wrappers, by their identity
        self.places = -1
        self.names: list[str] = []  # of the outputs

    def run(self) -> list[object]:
        for node in self.module.graph.nodes:
            if node.op == "output":
                values = output_values(self.module.graph)
                self.names = [v.name if isinstance(v, fx.Node) else "" for v in values]
                return [self.values[v] if isinstance(v, fx.Node) else v for v in values]
            self.meta = {key: value for key, value in node.meta.items() if key in ("stack", PHASE, "autocast")}
            self.values[node] = self._placeholder(node) if node.op == "placeholder" else self._call(node)
        raise AotAutogradError("the graph has no output node", ())

    def _placeholder(self, node: fx.Node) -> object:
        self.places += 1
        template, value = next(self.templates), self._fake(node.meta["val"])
        if template is None:
            return self._input(node.name, value)
        parts = [self.mode.from_spec(spec) for spec in template.specs()]
        for number, part in enumerate(parts):
            self._input(f"{node.name}_{number}", part)
        with self:
            whole = template.build(iter(parts)).requires_grad_(False)
        self.alive.append(whole)
        self.wholes[id(whole)] = self.places
        return self._known(whole, node)

    def _fake(self, value: object) -> object:
        return self.mode.from_spec(value) if isinstance(value, TensorSpec) else value

    def _input(self, name: str, value: object) -> object:
        new = self.graph.placeholder(name)
        new.target = new.name  # which is another one where a value has the name of another's part
        new.meta = {**self.meta, "val": value}
        return self._track(value, new)

    def _track(self, value: object, node: fx.Node) -> object:
        self.alive.append(value)
        if isinstance(value, torch.Tensor):
            self.node_of.setdefault(id(value), node)
        elif isinstance(value, torch.SymInt):
            self.symbols.setdefault(str(expr_of(value)), node)
        elif isinstance(value, torch.SymFloat):
            self.symbols.setdefault(str(value), node)
        return value

    def _known(self, value: object, node: fx.Node) -> object:
        """The value of a node. A wrapper is to be what autograd and aliasing were told of it."""
        said = node.meta.get("val")
        if isinstance(value, torch.Tensor) and isinstance(said, FakeTensor):
            same = str(tuple(value.shape)) == str(tuple(said.shape)) and value.dtype == said.dtype
            if not same:
                raise AotAutogradError(
                    f"{type(value).__qualname__}: {node.target} gives {tuple(value.shape)} of {value.dtype}, where"
                    f" PyTorch's own gives {tuple(said.shape)} of {said.dtype}",
                    node.meta.get("stack") or (),
                )
        return value

    def _call(self, node: fx.Node) -> object:
        target: Any = node.target
        args: Any
        args, kwargs = fx.map_arg((node.args, node.kwargs), self.values.__getitem__)  # type: ignore[misc]
        if node.op == "get_attr":
            return self._copied(node)
        if node.target is operator.getitem and any(_holds_wrapper(a) for a in args):
            return args[0][args[1]]
        if not _holds_wrapper((args, kwargs)) and node.target not in (MAKE, RELAY):
            return self._copied(node)
        if node.target in (MAKE, PART, RELAY):
            call = _CALLS[args[1]]
            if call.rehearse is not None:
                call.rehearse(args[0])
            return self._known(self._asked(call.run, args[0]), node)
        return self._known(self._asked(target, *args, **kwargs), node)

    def _asked(self, function: Callable[..., object], *args: object, **kwargs: object) -> object:
        """Runs code of a class. What it takes for granted of its tensors, the graph asserts where nobody else has."""
        with self, matching(MaskedTensor) as asked, unwarned(MaskedTensor):
            found = function(*args, **kwargs)
        for question in asked if self.meta.get(PHASE) == "backward" else ():
            with self:
                torch.ops.aten._assert_async.msg(question.truth, masks_differ())
        return found

    def _copied(self, node: fx.Node) -> object:
        """A call of plain tensors stays as it is."""

        def argument(source: fx.Node) -> Argument:
            lifted: Argument = self.lift(self.values[source])
            return lifted

        new = self.graph.node_copy(node, argument)
        value = self._fake(node.meta.get("val"))
        if isinstance(value, (tuple, list)):
            self.alive.append(new)
            return _Several(new, value) if node.target is not operator.getitem else value
        return self._track(value, new)

    # -- operators on plain tensors ---------------------------------------------------------

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        if wrappers_in(types):
            return NotImplemented
        if func is torch.ops.aten.detach_.default:  # of a tensor without history: autograd is above
            return args[0]
        if func._schema.is_mutable:
            raise UnsupportedMutation(
                f"{func} in __torch_dispatch__ writes to its arguments", self.meta.get("stack", ())
            )
        if func.name() == _IN_FLIGHT:
            with self:
                return torch.ops._c10d_functional.wait_tensor(args[0])
        if func is torch.ops.aten.lift_fresh.default and not isinstance(args[0], FakeTensor) and args[0].dim() == 0:
            number, options = args[0].item(), {"dtype": args[0].dtype, "device": args[0].device}
            with self:  # `torch.tensor(number)` in the code of a class
                return torch.ops.aten.full.default((), number, **options)
        if func is torch.ops.aten.view.default and not _is_viewable(args[0], args[1]):
            # The trace took the wrapper to be laid out otherwise. No node tells a view from a copy.
            with self:
                args = (torch.ops.aten.clone.default(args[0], memory_format=torch.contiguous_format), args[1])
        out = propagate(self.mode, func, args, kwargs or {})
        new = self.graph.call_function(func, self.lift(args), self.lift(dict(kwargs or {})))
        self._attach(new, out)
        return out

    def _attach(self, node: fx.Node, out: object) -> None:
        node.meta = {**self.meta, "val": out}
        if isinstance(out, (tuple, list)):
            for i, item in enumerate(out):
                self._attach(self.graph.call_function(operator.getitem, (node, i)), item)
        else:
            self._track(out, node)

    def lift(self, value: object) -> Any:
        if isinstance(value, torch.Tensor):
            node = self.node_of.get(id(value))
            if node is None:
                raise AotAutogradError("__torch_dispatch__ uses a tensor that is no part of its arguments", ())
            return node
        if isinstance(value, _Several):
            return value.node
        if isinstance(value, (torch.SymInt, torch.SymFloat)):
            return materialize(self.graph, value, self.symbols)
        if isinstance(value, (tuple, list)):
            return type(value)(self.lift(item) for item in value) if type(value) in (tuple, list) else value
        if isinstance(value, dict):
            return {key: self.lift(item) for key, item in value.items()}
        return value

    def owned(self, node: fx.Node) -> fx.Node:
        """A result with memory of its own: what lies in an input's is copied."""
        if memory_of(node).op != "placeholder":
            return node
        copied = self.graph.call_function(torch.ops.aten.clone.default, (node,))
        copied.meta = dict(node.meta)
        return copied


def _is_viewable(tensor: torch.Tensor, shape: Sequence[Size]) -> bool:
    try:
        propagate(tensor.fake_mode, torch.ops.aten.view.default, (tensor, shape), {})  # type: ignore[attr-defined]
    except RuntimeError:
        return False
    return True


class _Several:
    """Several results of a call that stayed as it was."""

    def __init__(self, node: fx.Node, values: Sequence[object]) -> None:
        self.node = node
        self.values = values

    def __getitem__(self, place: int) -> object:
        return self.values[place]


def _holds_wrapper(value: object) -> bool:
    if isinstance(value, torch.Tensor):
        return is_wrapper(type(value))
    if isinstance(value, (tuple, list)):
        return any(map(_holds_wrapper, value))
    if isinstance(value, dict):
        return any(map(_holds_wrapper, value.values()))
    return False


def of_wrappers(program: object, lowering: Lowering | None, dump: Dump | None) -> WrapperProgram | None:
    """The program as one over wrappers, if there are any among its values."""
    if not isinstance(program, fx.GraphModule):
        return None
    graphs = [module.graph for module in program.modules() if isinstance(module, fx.GraphModule)]
    values: Iterator[object] = (node.meta.get("val") for graph in graphs for node in graph.nodes)
    leaves = (leaf for value in values for leaf in pytree.tree_leaves(value))
    if not any(isinstance(leaf, torch.Tensor) and whole_of(leaf) is not None for leaf in leaves):
        return None
    return WrapperProgram(program, lowering, dump)
