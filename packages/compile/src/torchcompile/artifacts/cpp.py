"""`torchcompile.save_cpp`: an exported graph as a folder that a C++ program loads and runs, without Python."""

from __future__ import annotations

import contextlib
import operator
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import fx
from torch.utils import _pytree as pytree

import torchinductor
from primtorch.builder import as_spec
from primtorch.calls import Leaf, Measure, Number, Result, State
from primtorch.errors import PrimTorchError
from primtorch.fake import FakeMode
from primtorch.higher_order import HigherOrder, InvokeSubgraph
from primtorch.ledger import Ledger
from primtorch.lower import SIZE_FUNCTIONS, lower
from primtorch.prims import Prim
from primtorch.spec import TensorSpec
from primtorch.symbolic import ShapeEnv
from primtorch.symbolic.expr import Program as Steps
from primtorch.trace import trace
from torchcompile.backends import inductor_options
from torchcompile.errors import ArtifactError, InvalidArgument
from torchcompile.options import resolve
from torchcompile.signature import shape_env
from torchdynamo import Exported
from torchdynamo.exported.program import Constant, Reference, Surroundings
from torchinductor import CallInput, CallSignature, InductorError


def save_cpp(
    exported: Exported, folder: str | os.PathLike[str], *, options: Mapping[str, object] | None = None
) -> None:
    """Compiles an exported graph and writes it, with its parameters, for C++: `torchinductor::Program::load(folder)`.

    A call from C++ takes the tensors among the call's arguments, and the numbers that vary, in the order in which the
    arguments were passed, leaf by leaf; what else was passed is what it was. It gives the results leaf by leaf. What
    guards the exported graph's call is checked there. Results have no gradients.

    Args:
        exported: what `export` gave in this process, on CPUs.
        folder: made if it is not there. Files of an earlier program are replaced.
        options: as `compile` takes them.

    Raises:
        ArtifactError: the graph calls what only Python runs (an operator or a function that is defined in Python, a
            loop, a branch), is not for CPUs, was loaded from a file, or holds what has no form in one. The message
            names the operator and the user's line.
        InvalidArgument: `exported` is nothing that `export` gave, or an option is unknown.
    """
    if not isinstance(exported, Exported):
        raise InvalidArgument(f"save_cpp takes what torchcompile.export gave, not {exported!r}")
    _refuse(exported)
    settings = inductor_options(resolve(None, options))
    env = shape_env(exported.graph) or ShapeEnv()
    known = len(env.guards)
    try:
        graph, written = _operators(exported, env)
        lowered = lower(graph, walks_windows=torchinductor.walks_windows)
        torchinductor.choose_layouts(lowered)
        compiled = torchinductor.compile_graph(lowered, (), settings, torchinductor.Account("program", Ledger()))
        signature = _Signature(exported).of_call(written, _asked(exported, env, known), _outputs(lowered))
        torchinductor.write_program(folder, compiled.program, compiled.sources.values(), signature, settings)
    except (InductorError, PrimTorchError) as error:
        raise ArtifactError(f"the graph has no form for C++: {error}") from error
    except OSError as error:
        raise ArtifactError(f"{folder} cannot be written: {error}") from error


def _refuse(exported: Exported) -> None:
    for node in exported.graph.graph.nodes:
        if isinstance(node.target, HigherOrder) and not isinstance(node.target, InvokeSubgraph):
            told = f"{node.target.name} cannot run without Python, which calls the graphs in it"
            raise ArtifactError(told + _line(node))
    for node in exported.graph.graph.find_nodes(op="placeholder"):
        if "val" not in node.meta:
            raise ArtifactError("a graph that was loaded from a file is not compiled for C++: export it, and save that")
        device = getattr(node.meta["val"], "device", torch.device("cpu"))
        if device.type != "cpu":
            raise ArtifactError(
                f"{node.name} is on {device}: C++ programs are for CPUs as yet; export the model on one"
            )


# -- the graph -------------------------------------------------------------------------------------


def _operators(exported: Exported, env: ShapeEnv) -> tuple[fx.GraphModule, tuple[int, ...]]:
    """The graph of ATen's operators, and the inputs that it writes to, whose new values follow its other results."""
    gm = exported.graph
    of_operators = _is_of_operators(gm)
    if of_operators and not any(map(_has_sizes_of_data, gm.graph.nodes)):
        return gm, exported.written
    mode = FakeMode(shape_env=env)
    values = [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]
    examples = [mode.from_spec(as_spec(v)) if isinstance(v, (torch.Tensor, TensorSpec)) else v for v in values]
    # What autocast does to operators stands in a graph of operators.
    around = contextlib.nullcontext() if of_operators else _as_it_was(exported.checks.surroundings)
    with around, torch.no_grad(), mode:
        traced = trace(gm, *examples)
    _refuse_numbers(traced)
    return traced, (*exported.written, *traced.meta.get("written_inputs", ()))


def _refuse_numbers(gm: fx.GraphModule) -> None:
    """Raises ArtifactError where an operator takes a number that no input of the graph tells."""
    for node in gm.graph.nodes:
        if any(
            isinstance(value, (torch.SymInt, torch.SymFloat)) for value in pytree.tree_leaves((node.args, node.kwargs))
        ):
            why = "takes a number that no operator of the graph gives"
            raise ArtifactError(f"the graph has no form for C++: {node.target} {why}{_line(node)}")


def _line(node: fx.Node) -> str:
    return "".join(f"\n  {frame}" for frame in (node.meta.get("stack") or ())[-1:])


def _asked(exported: Exported, env: ShapeEnv, known: int) -> list[tuple[Steps, str]]:
    """What was asked of sizes, here and before: programs, and what they say.

    Of the first `known` guards those that capture asked of other numbers than the graph takes are among its checks.
    """
    found = []
    for place, guard in enumerate(env.guards):
        steps = env.spelt_out(guard.expr.program())
        if place >= known or {name for op, name in steps if op == "sym"} <= exported.symbols.keys():
            found.append((steps, str(guard.expr)))
    return found


def _outputs(gm: fx.GraphModule) -> int:
    """How many results a graph has."""
    (node,) = gm.graph.find_nodes(op="output")
    return len(node.args[0])  # type: ignore[arg-type]


def _is_of_operators(gm: fx.GraphModule) -> bool:
    return all(
        node.op not in ("call_method", "call_module", "call_function") or _is_operator(node) for node in gm.graph.nodes
    )


def _has_sizes_of_data(node: fx.Node) -> bool:
    """Whether an operator's result may be of another size than the example's, which the graph was traced with."""
    return torch.Tag.dynamic_output_shape in getattr(node.target, "tags", ())


def _is_operator(node: fx.Node) -> bool:
    """Whether a node calls an operator, takes one of its results or computes a size. Functions of torch do other things
    by the same names: `x[0]` is `operator.getitem` too."""
    if isinstance(node.target, (torch._ops.OpOverload, Prim, HigherOrder)):
        return True
    values = [source.meta.get("val") for source in node.all_input_nodes]
    if node.target is operator.getitem:
        return all(isinstance(value, (tuple, list)) for value in values)
    return node.target in SIZE_FUNCTIONS and not any(isinstance(v, (torch.Tensor, TensorSpec)) for v in values)


@contextlib.contextmanager
def _as_it_was(surroundings: Surroundings) -> Iterator[None]:
    """What the functions of a captured graph read of the process."""
    default = torch.get_default_dtype()
    with contextlib.ExitStack() as stack:
        for device in ("cpu", "cuda"):
            dtype = dict(surroundings.autocast).get(device)
            stack.enter_context(torch.autocast(device, dtype, enabled=dtype is not None))
        torch.set_default_dtype(surroundings.default_dtype)
        stack.callback(torch.set_default_dtype, default)
        yield


# -- the call --------------------------------------------------------------------------------------


def _names(exported: Exported) -> list[str]:
    """Of each leaf of a call: the parameter, and the place in what was passed for it."""
    takes, parameters = exported.signature.takes, exported.signature.parameters
    found = []
    for (_, first, *rest), _ in pytree.tree_flatten_with_path(takes.build(range(takes.size)))[0]:
        if isinstance(first, pytree.SequenceKey):
            name = parameters[first.idx] if first.idx < len(parameters) else f"args[{first.idx}]"
        else:
            name = str(getattr(first, "key", first))
        found.append(name + pytree.keystr(tuple(rest)))
    return found


class _Signature:
    """What an exported graph's call looks like from C++."""

    def __init__(self, exported: Exported) -> None:
        self.exported = exported
        self.names = _names(exported)
        leaves = [leaf for leaf in range(len(exported.checks.names)) if leaf not in exported.checks.constants]
        self.places = {leaf: place for place, leaf in enumerate(leaves)}  # among the inputs, of each leaf
        self.measures: dict[Measure, int] = {}
        self.kinds = {
            measure.of.index: "float" if name.startswith("f") else "int"
            for table in (exported.symbols, *(relation.symbols for relation in exported.checks.relations))
            for name, measure in table.items()
            if measure.kind == "value" and isinstance(measure.of, Leaf)
        }

    def of_call(self, written: Sequence[int], asked: Iterable[tuple[Steps, str]], outputs: int) -> CallSignature:
        exported, checks = self.exported, self.exported.checks
        relations = [
            *((relation.program, relation.symbols, relation.text) for relation in checks.relations),
            *((steps, exported.symbols, self.of_symbols(text)) for steps, text in asked),
        ]
        told: dict[Steps, str] = {}
        for steps, symbols, text in relations:
            told.setdefault(self.number(steps, symbols).program, self.named(text))
        feeds = tuple(map(self.feed, exported.feeds))
        first = outputs - len(written)
        results = tuple(map(self.result, exported.signature.results))
        lines = dict.fromkeys(f"{place[-1].file}:{place[-1].line}" for place in exported.assertions if place)
        news = [(feeds[place], first + turn) for turn, place in enumerate(written)]
        return CallSignature(
            inputs=tuple(map(self.input, self.places)),
            relations=told,
            feeds=feeds,
            results=results,
            same=self.pairs(checks.same),
            different=self.pairs(checks.different),
            apart=self.apart(),
            written=tuple((to, output) for to, output in news if isinstance(to, (Leaf, torch.Tensor))),
            met=tuple(met.index for met in exported.met),
            conditions=", ".join(lines),
            measures=tuple(self.measures),  # the last: the others ask for them
        )

    def input(self, leaf: int) -> CallInput:
        name, guard = self.names[leaf], self.exported.checks.tensors.get(leaf)
        if guard is None:
            return CallInput(name, self.kinds.get(leaf, "tensor"))
        sizes, strides = (tuple(-1 if n is None else n for n in of) for of in (guard.sizes, guard.strides))
        return CallInput(name, "tensor", guard.dtype, sizes, strides)

    def named(self, text: str) -> str:
        """What guards say, by the names of the inputs."""
        for known, name in zip(self.exported.checks.names, self.names, strict=True):
            text = re.sub(rf"(?<![\w.]){re.escape(known)}(?!\w)", name, text)
        return text

    def of_symbols(self, text: str) -> str:
        """What an expression over symbols says, by what they are."""
        for name, measure in self.exported.symbols.items():
            if isinstance(measure.of, Leaf) and measure.kind == "size":
                of = self.exported.checks.names[measure.of.index]
                text = re.sub(rf"\b{name}\b", f"{of}.shape[{measure.dim}]", text)
        return text

    def number(self, steps: Steps, symbols: Mapping[str, Measure]) -> Number:
        """A number with measures in the place of symbols; of a tensor that is kept with the program, what it is."""
        found: list[tuple[str, int | str | float]] = []
        for op, argument in steps:
            measure = symbols.get(str(argument)) if op == "sym" else None
            if op == "sym" and measure is None:
                raise ArtifactError(
                    f"what the program does depends on {argument}, a number that it takes out of a tensor"
                )
            if measure is None:
                found.append((op, argument))
            elif isinstance(measure.of, State):
                found.append(("const", int(measure.read(self.exported.state[measure.of.name]))))
            else:
                told = replace(measure, of=Leaf(self.places[measure.of.index]))
                found.append(("sym", self.measures.setdefault(told, len(self.measures))))
        return Number(tuple(found))

    def feed(self, feed: Reference) -> Leaf | Number | torch.Tensor:
        match feed:
            case Leaf(index=index):
                return Leaf(self.places[index])
            case State(name=name):
                return self.exported.state[name].detach()
            case Number(program=program):
                return self.number(program, self.exported.symbols)
        raise ArtifactError(f"the graph takes {feed}, which has no form for C++")

    def result(self, result: Reference) -> object:
        match result:
            case Result():
                return result
            case Constant(value=value):
                return value
        return self.feed(result)

    def pairs(self, found: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
        places = self.places
        return tuple((places[a], places[b]) for a, b in found if a in places and b in places)

    def apart(self) -> tuple[tuple[int, int], ...]:
        """Inputs that the graph writes to, each with every other one that it takes."""
        checks, feeds = self.exported.checks, self.exported.feeds
        leaf = lambda places: [of.index for place in places if isinstance(of := feeds[place], Leaf)]
        written, others = leaf(checks.written), leaf(checks.others)
        return self.pairs((a, b) for i, a in enumerate(written) for b in (*written[i + 1 :], *others))
