"""Graphs as text for a person: valid Python, one line a node, with shapes and the user's lines as comments."""

from __future__ import annotations

import linecache
import operator
import textwrap
from collections.abc import Iterator
from pathlib import PurePath
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch.fx.node import _get_qualified_name

from primtorch.arguments import TENSORS, Sizes
from primtorch.higher_order import HigherOrder
from primtorch.prims import Prim
from primtorch.schemas import UserFrame
from primtorch.spec import Size

_DTYPES: dict[torch.dtype, str] = {
    torch.float64: "f64", torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16",
    torch.int64: "i64", torch.int32: "i32", torch.int16: "i16", torch.int8: "i8", torch.uint8: "u8", torch.bool: "bool",
}  # fmt: skip
MADE_BY = "made_by"  # key of GraphModule.meta: the names of the passes that made the graph, in their order
_WIDEST = 88  # comments of longer lines follow at once instead of being aligned


def made_by(gm: fx.GraphModule, name: str, source: fx.GraphModule | None = None) -> None:
    """Notes that the pass `name` made `gm`, of itself or of `source`. The graph's text says so."""
    gm.meta[MADE_BY] = (*(gm if source is None else source).meta.get(MADE_BY, ()), name)


def graph_text(gm: fx.GraphModule, name: str = "forward", heading: str = "") -> str:
    """A graph as Python source: a function `name` of the placeholders.

    What each value is (dtype, shape, strides unless row-major) stands in a comment; `# file:line, in function: text`
    above a group of nodes is the user's line that they come from. The passes that made the graph, where they said so,
    and `heading` become comments at the top.
    """
    parameters: list[tuple[str, str]] = []
    body: list[tuple[str, str]] = []
    place: UserFrame | None = None
    bodies = _Bodies()
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            parameters.append((f"    {node.name},", _described(node)))
            continue
        frames: tuple[UserFrame, ...] = node.meta.get("stack") or ()
        if frames and frames[-1] != place:
            place = frames[-1]
            body.append((f"    # {_line(place)}", ""))
        if node.op == "output":
            body.append((f"    return {_argument(node.args[0])}", ""))
        else:
            body.append((f"    {node.name} = {_call(node, bodies)}", _described(node)))
    passes = gm.meta.get(MADE_BY, ())
    top = [f"# made by {', '.join(passes)}"] if passes else []
    top += [f"# {line}".rstrip() for line in heading.splitlines()]
    return "\n".join([*top, f"def {name}(", *_aligned(parameters), "):", *bodies.lines, *_aligned(body)]) + "\n"


class _Bodies:
    """The graphs that operators over graphs run, as functions within the function, which the calls name. One that
    several calls share is there once."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._names: dict[int, str] = {}

    def named(self, node: fx.Node) -> list[str]:
        """What the node's bodies are called."""
        found = []
        for body, label in zip(node.target.bodies, body_names(node), strict=True):  # type: ignore[union-attr]
            if isinstance(body, fx.GraphModule) and id(body) not in self._names:
                self._names[id(body)] = label
                self.lines += [*textwrap.indent(graph_text(body, label), "    ").splitlines(), ""]
            found.append(self._names.get(id(body), label))
        return found


def body_names(node: fx.Node) -> list[str]:
    """What the bodies of a node that calls an operator over graphs are called in the graph's text, unless an earlier
    node has them, too."""
    return [f"{node.name}_{label}" for label in node.target.labels]  # type: ignore[union-attr]


def value_text(value: object) -> str:
    """`f32[64, 32]` and the like: what a node's `meta["val"]` says."""
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(value_text, value))})"
    if not isinstance(value, TENSORS):
        return "" if value is None else f"{type(value).__name__} {value}"
    dtype = _DTYPES.get(value.dtype, str(value.dtype).removeprefix("torch."))
    text = f"{dtype}[{', '.join(map(str, value.shape))}]"
    strides = tuple(value.stride())
    if not _row_major(value.shape, strides):
        text += f" strides ({', '.join(map(str, strides))})"
    return text if value.device.type == "cpu" else f"{text} on {value.device}"


def _row_major(shape: Sizes, strides: Sizes) -> bool:
    """Whether the printed strides say nothing that the shape does not; compared as text so that no guard is asked."""
    expected: Size = 1
    for size, stride in zip(reversed(tuple(shape)), reversed(strides), strict=True):
        if str(size) != "1" and str(stride) != str(expected):
            return False
        expected = expected * (1 if str(size) == "0" else size)
    return True


def _described(node: fx.Node) -> str:
    return value_text(node.meta.get("val"))


def _aligned(lines: list[tuple[str, str]]) -> Iterator[str]:
    """Comments in one column."""
    column = max((len(code) for code, comment in lines if comment and len(code) <= _WIDEST), default=0)
    for code, comment in lines:
        yield f"{code:{column}}  # {comment}" if comment else code


def _line(frame: UserFrame) -> str:
    text = linecache.getline(frame.file, frame.line).strip()
    return f"{PurePath(frame.file).name}:{frame.line}, in {frame.function}" + (f": {text}" if text else "")


def _call(node: fx.Node, bodies: _Bodies) -> str:
    arguments = [_argument(a) for a in node.args] + [f"{k}={_argument(v)}" for k, v in node.kwargs.items()]
    if node.op == "get_attr":
        return f"self.{node.target}"
    if node.op == "call_module":
        return f"self.{node.target}({', '.join(arguments)})"
    if node.op == "call_method":
        return f"{arguments[0]}.{node.target}({', '.join(arguments[1:])})"
    if node.target is operator.getitem:
        return f"{arguments[0]}[{arguments[1]}]"
    if isinstance(node.target, HigherOrder):
        arguments = [*bodies.named(node), *arguments]
    return f"{_target(node.target)}({', '.join(arguments)})"


def _target(target: Any) -> str:
    if isinstance(target, Prim):
        return f"prims.{target.name}"
    if isinstance(target, OpOverload):
        return str(target)
    return _get_qualified_name(target).replace("torch._C._nn.", "torch.nn.functional.")


def _argument(value: object) -> str:
    if isinstance(value, fx.Node):
        return value.name
    if isinstance(value, tuple):
        inner = ", ".join(map(_argument, value))
        return f"({inner},)" if len(value) == 1 else f"({inner})"
    if isinstance(value, list):
        return f"[{', '.join(map(_argument, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k!r}: {_argument(v)}" for k, v in value.items()) + "}"
    if isinstance(value, slice):
        return f"slice({_argument(value.start)}, {_argument(value.stop)}, {_argument(value.step)})"
    if isinstance(value, torch.device):
        return f"torch.device({str(value)!r})"
    return str(value) if isinstance(value, torch.SymInt) else repr(value)
