"""An exported graph in a file: a zip archive of text and numbers, of which nothing is unpickled, imported or executed.

    program.json     version, graph, signature, feeds, checks: see docs/export.md
    tensors/N        the bytes of one piece of memory; `program.json` says which tensors lie in it

Reading makes a graph of functions that `targets` knows, and of nothing else. What does not fit raises UnsafeArchive.
"""

from __future__ import annotations

import json
import keyword
import math
import os
import zipfile
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import torch
from torch import fx

from primtorch.calls import Leaf, Measure, Number, Result, State
from primtorch.control_flow import Cond, Scan, WhileLoop
from primtorch.files import appearing
from primtorch.higher_order import HigherOrder, InvokeSubgraph
from primtorch.own_derivatives import OwnDerivative
from primtorch.schemas import UserFrame
from primtorch.symbolic.expr import Program
from torchdynamo.errors import NotExportable, UnsafeArchive
from torchdynamo.exported.program import (
    ArrayOf,
    Checks,
    Constant,
    Exported,
    Reference,
    Relation,
    Signature,
    Surroundings,
)
from torchdynamo.exported.structure import Structure
from torchdynamo.exported.targets import attributes, function_named, methods, name_of
from torchdynamo.schemas import TensorGuard

Json: TypeAlias = "bool | int | float | str | Sequence[Json] | Mapping[str, Json] | None"
VERSION = 1
_PROGRAM = "program.json"
T = TypeVar("T")


def save(exported: Exported, path: str | os.PathLike[str]) -> None:
    """Writes an exported graph with the tensors that it holds.

    Raises:
        NotExportable: something of it has no form in a file.
    """
    memories: list[bytes] = []
    text = json.dumps(_program(exported, memories), indent=1, allow_nan=False)
    with appearing(path) as stream, zipfile.ZipFile(stream, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr(_PROGRAM, text)
        for number, memory in enumerate(memories):
            archive.writestr(f"tensors/{number}", memory)


def load(path: str | os.PathLike[str], *, classes: Sequence[type] = (), operators: Collection[str] = ()) -> Exported:
    """Reads an exported graph. The file may be a stranger's: nothing of it is executed before or while it is checked.

    Args:
        classes: named tuples that arguments or results are made of; dataclasses are known once they are registered with
            `torch.utils._pytree.register_dataclass`.
        operators: namespaces beside torch's own whose operators the graph may call.

    Raises:
        UnsafeArchive: the file is none of `save`'s, or calls or holds what has no place in one.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            text = json.loads(archive.read(_PROGRAM))
            if text.get("version") != VERSION:
                raise UnsafeArchive(f"the file is of version {text.get('version')!r}, expected {VERSION}")
            memories = [archive.read(f"tensors/{number}") for number in range(text["memories"])]
        return _Reader(text, memories, classes, operators).exported()
    except (zipfile.BadZipFile, KeyError, IndexError, TypeError, AttributeError, ValueError, RuntimeError) as error:
        if isinstance(error, UnsafeArchive):
            raise
        raise UnsafeArchive(f"the file is no exported graph: {type(error).__name__}: {error}") from error


# -- writing -------------------------------------------------------------------------------------


def _program(exported: Exported, memories: list[bytes]) -> dict[str, Json]:
    checks, signature = exported.checks, exported.signature
    state = _tensors({**exported.state, **_constants(exported.graph)}, memories)  # fills `memories`
    return {
        "version": VERSION,
        "torch": torch.__version__,
        "memories": len(memories),
        "state": state,
        "graph": _graph(exported.graph),
        "feeds": [_reference(feed) for feed in exported.feeds],
        "symbols": {name: _measure(m) for name, m in exported.symbols.items()},
        "parameters": signature.parameters,
        "takes": signature.takes.encode(),
        "gives": signature.gives.encode(),
        "results": [_reference(result) for result in signature.results],
        "met": [_reference(met) for met in exported.met],
        "assertions": [[[f.file, f.line, f.function] for f in place] for place in exported.assertions],
        "written": exported.written,
        "written_apart": exported.written_apart,
        "guards": exported.print_guards(),
        "checks": {
            "names": checks.names,
            "tensors": [[index, _tensor_guard(guard)] for index, guard in checks.tensors.items()],
            "constants": [[index, _plain(value)] for index, value in checks.constants.items()],
            "relations": [
                {
                    "program": _plain(r.program),
                    "symbols": {name: _measure(m) for name, m in r.symbols.items()},
                    "text": r.text,
                }
                for r in checks.relations
            ],
            "same": checks.same,
            "different": checks.different,
            "arrays": [[index, flipped] for index, flipped in checks.arrays.items()],
            "written": checks.written,
            "others": checks.others,
            "surroundings": _plain(_fields(checks.surroundings)),
        },
    }


def _fields(record: TensorGuard | Surroundings) -> tuple[object, ...]:
    return tuple(getattr(record, name) for name in type(record).__slots__)


def _tensors(held: Mapping[str, torch.Tensor], memories: list[bytes]) -> dict[str, Json]:
    """Where each tensor lies; tensors that share memory share it in the file."""
    known: dict[int, int] = {}
    found: dict[str, Json] = {}
    for name, tensor in held.items():
        if tensor.layout is not torch.strided:
            raise NotExportable(f"{name} is a tensor of layout {tensor.layout}, which has no form in a file")
        storage = tensor.untyped_storage()
        place = known.get(storage._cdata)
        if place is None:
            place = known[storage._cdata] = len(memories)
            flat = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            memories.append(flat.cpu().numpy().tobytes())
        found[name] = {
            "memory": place,
            "dtype": _plain(tensor.dtype),
            "device": str(tensor.device),
            "shape": list(tensor.shape),
            "strides": list(tensor.stride()),
            "offset": int(tensor.storage_offset()),
            "requires_grad": tensor.requires_grad,
            "parameter": isinstance(tensor, torch.nn.Parameter),
        }
    return found


_HELD = "graph."  # what names of tensors that a graph itself holds begin with


def _within(held: str, node: str, place: int) -> str:
    """What those begin with that a body of a node's operator holds."""
    return f"{held}{node}.{place}."


def _constants(module: fx.GraphModule, held: str = _HELD) -> dict[str, torch.Tensor]:
    """The tensors that a graph and its bodies hold, by their names in a file."""
    found = {f"{held}{name}": tensor for name, tensor in (*module.named_buffers(), *module.named_parameters())}
    for node in module.graph.nodes:
        if isinstance(node.target, HigherOrder):
            for place, body in enumerate(node.target.bodies):
                found |= _constants(body, _within(held, node.name, place)) if isinstance(body, fx.GraphModule) else {}
    return found


def _graph(module: fx.GraphModule) -> list[dict[str, Json]]:
    rows = []
    for node in module.graph.nodes:
        target: Json
        if isinstance(node.target, HigherOrder):
            target = _over_bodies(node.target)
        elif node.op == "call_function":
            target = name_of(node.target)
        elif node.op == "call_module" or (node.op == "call_method" and node.target not in methods()):
            raise NotExportable(f"{node.op} {node.target} has no form in a file; try aten_graph=True")
        else:
            target = node.target
        row = {"op": node.op, "name": node.name, "target": target}
        stack = node.meta.get("stack") or ()
        if stack:
            row["line"] = [stack[-1].file, stack[-1].line, stack[-1].function]
        rows.append({**row, "args": _plain(tuple(node.args)), "kwargs": _plain(dict(node.kwargs))})
    return rows


_KINDS: tuple[type[HigherOrder], ...] = (Cond, InvokeSubgraph, OwnDerivative, Scan, WhileLoop)
_OVER_BODIES: Mapping[str, type[HigherOrder]] = {kind.name: kind for kind in _KINDS}
_MORE_OF_KINDS: Mapping[str, Callable[[Any], Any]] = {  # what else a record has, and how it is read
    "carries": int,
    "mapped": int,
    "reverse": bool,
    "title": str,
    "outputs": int,
    "saved": lambda rows: tuple((bool(own), int(index)) for own, index in rows),
    "places": lambda places: tuple(map(int, places)),
    "materialize": bool,
    "once": bool,
    "turns": bool,
}


def _over_bodies(operator: HigherOrder) -> Json:
    """An operator over graphs, with its graphs."""
    if _OVER_BODIES.get(operator.name) is not type(operator):
        raise NotExportable(f"the graph calls {operator.name}, which has no form in a file")
    bodies = []
    for body in operator.bodies:
        if not isinstance(body, fx.GraphModule):
            raise NotExportable(f"a body of {operator.name} has no form in a file")
        bodies.append(_graph(body))
    numbers: dict[str, Json] = {name: getattr(operator, name) for name in _MORE_OF_KINDS if hasattr(operator, name)}
    return {
        "over": operator.name,
        "bodies": bodies,
        "sizes": operator.sizes,
        "differentiable": list(map(int, operator.differentiable)),
        "tags": sorted(operator.tags),
        "numbers": numbers,
    }


def _reference(of: Reference) -> Json:
    match of:
        case Leaf(index=index):
            return ["leaf", index]
        case State(name=name):
            return ["state", name]
        case Result(index=index):
            return ["result", index]
        case Number(program=program):
            return ["number", _plain(program)]
        case Constant(value=value):
            return ["constant", _plain(value)]
        case ArrayOf():
            return ["array", [_reference(of.tensor), of.flipped, of.strides, of.writeable, of.scalar]]


def _measure(measure: Measure) -> Json:
    return [_reference(measure.of), measure.kind, measure.dim]


def _tensor_guard(guard: TensorGuard) -> Json:
    names = {torch.Tensor: "Tensor", torch.nn.Parameter: "Parameter"}
    if guard.type not in names:
        raise NotExportable(f"an argument is a {guard.type.__qualname__}, which has no form in a file")
    return [names[guard.type], *(_plain(value) for value in _fields(guard)[1:])]


_NAMED = (torch.dtype, torch.layout, torch.memory_format)


def _plain(value: object) -> Json:
    """A value of a graph as JSON has it."""
    kind = type(value)
    if value is None or (isinstance(value, (bool, int, str)) and kind in (bool, int, str)):
        return value
    if isinstance(value, float) and kind is float:
        return value if math.isfinite(value) else {"float": str(value)}
    if isinstance(value, list) and kind is list:
        return [_plain(item) for item in value]
    if isinstance(value, fx.Node):
        return {"node": value.name}
    if isinstance(value, complex) and kind is complex:
        return {"complex": [_plain(value.real), _plain(value.imag)]}
    if kind is torch.device:
        return {"device": str(value)}
    if isinstance(value, _NAMED):
        return {"torch": str(value).removeprefix("torch.")}
    if value is ...:
        return {"ellipsis": 0}
    if isinstance(value, slice):
        return {"slice": [_plain(item) for item in (value.start, value.stop, value.step)]}
    if isinstance(value, (tuple, fx.immutable_collections.immutable_list)):
        return {"tuple" if isinstance(value, tuple) else "list": [_plain(item) for item in value]}
    if isinstance(value, dict):
        return {"dict": [[_plain(key), _plain(item)] for key, item in value.items()]}
    if isinstance(value, range):
        return {"range": [value.start, value.stop, value.step]}
    raise NotExportable(f"a {kind.__module__}.{kind.__qualname__} has no form in a file: {value!r:.80}")


# -- reading -------------------------------------------------------------------------------------


class _Reader:
    """One file's text and memories."""

    def __init__(
        self, text: Any, memories: Sequence[bytes], classes: Sequence[type], operators: Collection[str]
    ) -> None:
        self.text, self.classes, self.operators = text, classes, operators
        self.memories = [bytearray(memory) for memory in memories]
        self.nodes: dict[str, fx.Node] = {}

    def exported(self) -> Exported:
        text = self.text
        held = self._state(text["state"])
        graph = self._graph(text["graph"], held, _HELD)
        return Exported(
            graph=graph,
            guards=(),
            signature=Signature(
                tuple(map(str, text["parameters"])),
                Structure.decode(text["takes"], self.classes),
                Structure.decode(text["gives"], self.classes),
                tuple(map(self._reference, text["results"])),
            ),
            feeds=tuple(map(self._reference, text["feeds"])),
            state={name: tensor for name, tensor in held.items() if not name.startswith(_HELD)},
            checks=self._checks(text["checks"]),
            symbols={str(name): self._measure(m) for name, m in text["symbols"].items()},
            met=tuple(_of(Result, self._reference(met)) for met in text["met"]),
            assertions=tuple(tuple(_frame(frame) for frame in place) for place in text["assertions"]),
            written=_integers(text["written"]),
            written_apart=_integers(text.get("written_apart", ())),
            text=str(text["guards"]),
        )

    def _state(self, rows: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        known: dict[int, torch.Tensor] = {}
        found = {}
        for name, row in rows.items():
            place, dtype = int(row["memory"]), _of(torch.dtype, self._value(row["dtype"]))
            device = torch.device(str(row["device"]))
            if place not in known:
                memory = self.memories[place]
                flat = torch.frombuffer(memory, dtype=torch.uint8) if memory else torch.empty(0, dtype=torch.uint8)
                known[place] = flat.clone().to(device)  # of an address that suits every dtype
            if len(known[place]) % dtype.itemsize:
                known[place] = known[place][: len(known[place]) // dtype.itemsize * dtype.itemsize]
            flat = known[place].view(dtype)
            tensor = flat.as_strided(_integers(row["shape"]), _integers(row["strides"]), int(row["offset"]))
            tensor = torch.nn.Parameter(tensor, False) if row["parameter"] is True else tensor
            found[name] = tensor.requires_grad_() if row["requires_grad"] is True else tensor
        return found

    def _graph(self, rows: Sequence[Any], tensors: Mapping[str, torch.Tensor], held: str) -> fx.GraphModule:
        """held: what the names of the graph's own tensors begin with."""
        graph, root = fx.Graph(), torch.nn.Module()
        for row in rows:
            op, name, target = row["op"], str(row["name"]), row["target"]
            if not name.isidentifier() or keyword.iskeyword(name) or name in self.nodes:
                raise UnsafeArchive(f"no name of a node: {name!r}")
            args, kwargs = self._value(row["args"]), self._value(row["kwargs"])
            if op == "call_function" and isinstance(target, dict):
                called: Any = self._over_bodies(target, name, tensors, held)
            elif op == "get_attr":
                called = _held(root, str(target), tensors.get(f"{held}{target}"))
            else:
                called = self._target(op, target, args)
            node = graph.create_node(op, called, args, kwargs, name=name)
            if node.name != name:
                raise UnsafeArchive(f"no name of a node: {name!r}")
            node.meta["stack"] = (_frame(row["line"]),) if "line" in row else ()
            self.nodes[name] = node
        graph.lint()
        return fx.GraphModule(root, graph, class_name="Exported")

    def _target(self, op: str, target: Any, args: Sequence[object]) -> Callable[..., object] | str:
        match op:
            case "call_function":
                found = function_named(target, self.operators)
                if found is getattr and (len(args) != 2 or args[1] not in attributes()):
                    raise UnsafeArchive(f"the file reads the attribute {args[1:]!r}")
                return found
            case "call_method":
                if target not in methods():
                    raise UnsafeArchive(f"the file calls the method {target!r}, which no graph may call")
            case "placeholder":
                if not str(target).isidentifier() or keyword.iskeyword(str(target)):
                    raise UnsafeArchive(f"no name of an input: {target!r}")
            case "output":
                return "output"
            case _:
                raise UnsafeArchive(f"the file has a node of kind {op!r}")
        return str(target)

    def _over_bodies(
        self, row: Mapping[str, Any], node: str, tensors: Mapping[str, torch.Tensor], held: str
    ) -> HigherOrder:
        around, bodies = self.nodes, []
        for place, rows in enumerate(row["bodies"]):
            self.nodes = {}
            bodies.append(self._graph(rows, tensors, _within(held, node, place)))
        self.nodes = around
        numbers = {name: read(row["numbers"][name]) for name, read in _MORE_OF_KINDS.items() if name in row["numbers"]}
        kind, history = _OVER_BODIES[str(row["over"])], tuple(map(bool, row["differentiable"]))
        tags = frozenset(map(str, row["tags"]))
        return kind(tuple(bodies), int(row["sizes"]), history, tags=tags, **numbers)

    def _checks(self, text: Any) -> Checks:
        kinds = {"Tensor": torch.Tensor, "Parameter": torch.nn.Parameter}
        return Checks(
            names=tuple(map(str, text["names"])),
            tensors={
                int(index): TensorGuard(kinds[guard[0]], *(self._value(value) for value in guard[1:]))
                for index, guard in text["tensors"]
            },
            constants={int(index): self._value(value) for index, value in text["constants"]},
            relations=tuple(
                Relation(
                    self._steps(r["program"]),
                    {str(name): self._measure(m) for name, m in r["symbols"].items()},
                    str(r["text"]),
                )
                for r in text["relations"]
            ),
            same=tuple((int(a), int(b)) for a, b in text["same"]),
            different=tuple((int(a), int(b)) for a, b in text["different"]),
            written=_integers(text["written"]),
            others=_integers(text["others"]),
            surroundings=Surroundings(*self._value(text["surroundings"])),
            arrays={int(index): _integers(flipped) for index, flipped in text.get("arrays", ())},
        )

    def _steps(self, value: Any) -> Program:
        return tuple((str(op), operand) for op, operand in self._value(value))

    def _reference(self, value: Any) -> Reference:
        kind, of = value
        makers: Mapping[str, Callable[[Any], Reference]] = {
            "leaf": lambda v: Leaf(int(v)),
            "state": lambda v: State(str(v)),
            "result": lambda v: Result(int(v)),
            "number": lambda v: Number(self._steps(v)),
            "constant": lambda v: Constant(self._value(v)),
            "array": self._array,
        }
        return makers[kind](of)

    def _array(self, value: Any) -> ArrayOf:
        tensor, flipped, strides, writeable, scalar = value
        of = self._reference(tensor)
        if not isinstance(of, (Leaf, State, Result)):
            raise UnsafeArchive(f"no tensor of an array: {tensor!r}")
        return ArrayOf(
            of, _integers(flipped), None if strides is None else _integers(strides), bool(writeable), bool(scalar)
        )

    def _measure(self, value: Any) -> Measure:
        of, kind, dim = value
        place = self._reference(of)
        if not isinstance(place, (Leaf, State)):
            raise UnsafeArchive(f"no place of a number: {of!r}")
        return Measure(place, str(kind), int(dim))

    def _value(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self._value(item) for item in value]
        if not isinstance(value, dict):
            return value
        ((kind, of),) = value.items()
        return _VALUES[kind](self, of)


_VALUES: Mapping[str, Callable[[_Reader, Any], object]] = {
    "node": lambda reader, of: reader.nodes[of],
    "float": lambda reader, of: float(of),
    "complex": lambda reader, of: complex(*map(reader._value, of)),
    "device": lambda reader, of: torch.device(str(of)),
    "torch": lambda reader, of: _named(of),
    "ellipsis": lambda reader, of: ...,
    "slice": lambda reader, of: slice(*map(reader._value, of)),
    "tuple": lambda reader, of: tuple(map(reader._value, of)),
    "list": lambda reader, of: [reader._value(item) for item in of],
    "dict": lambda reader, of: {reader._value(key): reader._value(item) for key, item in of},
    "range": lambda reader, of: range(*map(int, of)),
}


def _named(name: object) -> torch.dtype | torch.layout | torch.memory_format:
    found = getattr(torch, str(name), None)
    if not isinstance(found, _NAMED):
        raise UnsafeArchive(f"torch has no dtype, layout or memory format {name!r}")
    return found


def _held(root: torch.nn.Module, name: str, tensor: torch.Tensor | None) -> str:
    """A tensor that a graph holds, under the name by which it reads it."""
    if not name.isidentifier() or tensor is None:
        raise UnsafeArchive(f"the file reads {name!r}, which it does not hold")
    root.register_buffer(name, tensor)
    return name


def _of(kind: type[T], value: object) -> T:
    if not isinstance(value, kind):
        raise UnsafeArchive(f"expected a {kind.__name__}, found {value!r}")
    return value


def _integers(values: Any) -> tuple[int, ...]:
    return tuple(map(int, values))


def _frame(frame: Any) -> UserFrame:
    file, line, function = frame
    return UserFrame(str(file), int(line), str(function))
