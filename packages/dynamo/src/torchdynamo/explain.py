"""What capture makes of a call: graphs, breaks, guards and seconds as records, as text and as HTML; and why
a compiled function does not serve a call."""

from __future__ import annotations

import functools
import html
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, cast

from torch import fx

from primtorch import graph_text
from primtorch.frozen import record
from primtorch.ledger import Effect, Event, event_tables, of, total
from primtorch.schemas import UserFrame
from torchdynamo._C import CompiledCallable, Entry
from torchdynamo.api import optimize, owner_of
from torchdynamo.function import Compiled
from torchdynamo.guards.failure import Failure, first_failure
from torchdynamo.guards.guard_table import guard_rows
from torchdynamo.interpreter.frame import CODES
from torchdynamo.reasons import REASONS
from torchdynamo.schemas import CaptureOptions, GraphBreak, Guard
from torchdynamo.sources import Scope

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

Section = tuple[str, list[str], list[list[str]]]  # title, head, rows


@dataclass(slots=True)
class Explanation:
    """Everything that one call compiled.

    Attributes:
        seconds: of capture, without the back end's.
        recompiles: (function, why each version did not fit) of functions that were compiled more than once.
        events: whatever did not run as one compiled program, once; `breaks`, `recompiles` and `fallbacks` are of it.
        result: what the call returned.
        more: what others tell of the graphs.
    """

    graphs: list[fx.GraphModule] = field(default_factory=list)
    breaks: list[GraphBreak] = field(default_factory=list)
    guards: list[Guard] = field(default_factory=list)
    recompiles: list[tuple[str, tuple[str, ...]]] = field(default_factory=list)
    events: tuple[Event, ...] = ()
    seconds: float = 0.0
    result: Any = None
    more: list[Section] = field(default_factory=list)

    @property
    def op_count(self) -> int:
        """Operations in all graphs."""
        return sum(map(_operations, self.graphs))

    @property
    def fallbacks(self) -> tuple[Event, ...]:
        """Functions that ran eagerly as a whole."""
        return of(self.events, Effect.FALLBACK)

    def sections(self) -> list[Section]:
        """Each part that has something to say."""
        totals = [
            ["graphs", str(len(self.graphs))],
            ["operations in them", str(self.op_count)],
            ["breaks", str(len(self.breaks))],
            ["guards", str(len(self.guards))],
            ["recompilations", str(len(self.recompiles))],
            ["ran eagerly", str(total(self.fallbacks))],
            ["seconds of capture", f"{self.seconds:.3f}"],
        ]
        graphs = [
            [str(number), str(len(graph.graph.find_nodes(op="placeholder"))), str(_operations(graph)), _lines_of(graph)]
            for number, graph in enumerate(self.graphs)
        ]
        breaks = [
            [b.reason, b.detail, _places(b.user_frames), REASONS[b.reason].explanation, REASONS[b.reason].remedy]
            for b in self.breaks
        ]
        recompiles = [[name, "\n".join(reasons)] for name, reasons in self.recompiles]
        found: list[Section] = [
            ("Capture", ["", ""], totals),
            ("Graphs", ["graph", "inputs", "operations", "of"], graphs),
            *self.more,
            ("Breaks", ["reason", "at", "where (outermost first)", "why", "what to do"], breaks),
            ("Guards", ["of", "what", "has to be", "read at"], [list(row) for row in guard_rows(self.guards)]),
            ("Recompilations", ["function", "why no version fitted"], recompiles),
            *event_tables([e for e in self.events if e.effect not in (Effect.BREAK, Effect.RECOMPILE)]),
        ]
        return [section for section in found if section[2]]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.table import Table

        for title, head, rows in self.sections():
            table = Table(*head, title=title, title_justify="left", show_header=any(head))
            for row in rows:
                table.add_row(*(text.replace("[", r"\[") for text in row))
            yield table

    def __str__(self) -> str:
        from rich.console import Console

        console = Console(width=160, no_color=True)
        with console.capture() as capture:
            console.print(self)
        return capture.get()

    def html(self) -> str:
        """The same as a page of its own, with the graphs' code."""
        parts = [
            "<!DOCTYPE html><html><head><meta charset='utf-8'><title>What was captured</title>",
            _STYLE,
            "</head><body>",
        ]
        for title, head, rows in self.sections():
            parts.append(f"<h2>{html.escape(title)}</h2><table>")
            if any(head):
                parts.append(_html_row("th", head))
            parts += [_html_row("td", row) for row in rows]
            parts.append("</table>")
        for number, graph in enumerate(self.graphs):
            code = html.escape(graph_text(graph, f"graph_{number}"))
            parts.append(f"<details><summary>Graph {number}</summary><pre>{code}</pre></details>")
        return "\n".join([*parts, "</body></html>"]) + "\n"


_STYLE = (
    "<style>body{font:14px sans-serif;margin:2em}table{border-collapse:collapse;margin-bottom:1em}"
    "td,th{border:1px solid #bbb;padding:.2em .6em;text-align:left;vertical-align:top;white-space:pre-line}</style>"
)


def _html_row(tag: str, texts: Sequence[str]) -> str:
    return "<tr>" + "".join(f"<{tag}>{html.escape(text)}</{tag}>" for text in texts) + "</tr>"


def _operations(graph: fx.GraphModule) -> int:
    return sum(node.op.startswith("call") for node in graph.graph.nodes)


def _lines_of(graph: fx.GraphModule) -> str:
    """The user's lines that a graph's operations come from, first to last."""
    stacks = [node.meta.get("stack") for node in graph.graph.nodes if node.op.startswith("call")]
    frames = [stack[0] for stack in stacks if stack]
    if not frames:
        return ""
    low, high = min(frame.line for frame in frames), max(frame.line for frame in frames)
    lines = str(low) if low == high else f"{low}-{high}"
    return f"{frames[0].function} ({PurePath(frames[0].file).name}:{lines})"


def _places(frames: Sequence[UserFrame]) -> str:
    return "\n".join(f"{frame.file}:{frame.line} in {frame.function}" for frame in frames)


def explain(
    function: Callable[..., object],
    told: Callable[[Explanation, int, Sequence[object]], None] | None = None,
    options: CaptureOptions | None = None,
) -> Callable[..., Explanation]:
    """`explain(f)(*args)` runs the call with every graph executed as it was captured, and tells what was captured.

    It goes the way of `optimize(backend)(f)(*args)` with a back end that runs graphs as they are.

    Args:
        told: called at each run of a graph, with its number and its inputs; what it has to say goes to `more`.
        options: of the capture.
    """

    def run(*args: object, **kwargs: object) -> Explanation:
        found = Explanation()

        def backend(graph: fx.GraphModule, inputs: list[object]) -> Callable[..., Sequence[object]]:
            found.graphs.append(graph)
            return graph.forward if told is None else functools.partial(run_told, len(found.graphs) - 1, graph)

        def run_told(number: int, graph: fx.GraphModule, *inputs: object) -> Sequence[object]:
            assert told is not None
            told(found, number, inputs)
            given: Sequence[object] = graph.forward(*inputs)
            return given

        compiled = optimize(backend, options=options)(function)
        found.result = compiled(*args, **kwargs)
        owner = owner_of(compiled)
        found.breaks += owner.stats.break_details
        found.recompiles += owner.stats.recompile_reasons
        found.events = owner.stats.events
        found.seconds = owner.stats.seconds
        for entry in owner.versions():
            found.guards += entry.info.guards
        return found

    return run


@record
class Miss:
    """Why one version of a compiled function does not serve a call; `failure` is None when it does."""

    version: int
    failure: Failure | None

    def __str__(self) -> str:

        return f"version {self.version}: {self.failure or 'serves the call'}"


def explain_guards(compiled: object) -> Callable[..., tuple[Miss, ...]]:
    """`explain_guards(compiled)(*args)` tells which guard of each version would fail first at such a call.

    That is the guard, what it wants and what it finds, and the user's line that it stands for. Nothing is run or
    compiled.

    Raises:
        TypeError: `compiled` is no compiled callable, or the call does not fit its signature.
    """
    owner = owner_of(compiled)
    leading = (compiled.__self__,) if hasattr(compiled, "__self__") else ()

    def run(*args: object, **kwargs: object) -> tuple[Miss, ...]:
        target = owner.compiled()
        assert target is not None
        flat = bound_arguments(target, (*leading, *args), kwargs)
        return tuple(_miss(owner.function, number, entry, flat) for number, entry in enumerate(target.entries))

    return run


def _miss(function: types.FunctionType, number: int, entry: Entry, flat: Sequence[object]) -> Miss:
    info: Compiled = entry.info
    return Miss(number, first_failure(info.guards, Scope.of(function, flat, info.pinned)))


def bound_arguments(target: CompiledCallable, args: Sequence[object], kwargs: dict[str, object]) -> tuple[object, ...]:
    """The flat argument vector of a call, bound as CPython binds it."""
    function: Any = target.function  # typed as what a class attribute would be bound to
    binder = cast(Any, types.FunctionType(CODES.get(function.__code__).binder, {}, None, function.__defaults__))
    binder.__kwdefaults__ = function.__kwdefaults__
    return tuple(binder(*args, **kwargs))
