"""A program in a file: run while all it compiles is verified, and reduced as source where no graph shows the fault."""

from __future__ import annotations

import ast
import contextlib
import copy
import io
import signal
import sys
import tempfile
import threading
import time
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

import torchdynamo
from primtorch.ambient import AMBIENT
from primtorch.ledger import LEDGER, Effect, of
from torchcompile.faults.children import Death, Teller, in_child, possible
from torchcompile.faults.examine import WATCHING, Watch
from torchcompile.faults.judge import numbers_of_its_own
from torchcompile.faults.reduce import Progress
from torchcompile.faults.schemas import Fault

_MOST_SECONDS = 30.0  # that a proposal may take
_FIELDS = ("body", "orelse", "finalbody")  # of statements, those that hold statements


@contextlib.contextmanager
def _as_main(path: Path, arguments: Sequence[str]) -> Iterator[types.ModuleType]:
    """A module `__main__` for a script, with its arguments, and its folder to import from. All is put back."""
    main, argv, search = sys.modules.get("__main__"), sys.argv, list(sys.path)
    states = [(state, state.read()) for state in AMBIENT if state.write is not None]
    module = types.ModuleType("__main__")
    module.__file__ = str(path)
    sys.modules["__main__"] = module
    sys.argv, sys.path[0:0] = [str(path), *arguments], [str(path.parent)]
    try:
        with numbers_of_its_own(), warnings.catch_warnings():
            yield module
    finally:
        for state, value in states:  # `preserved` leaves what others than the compiler set
            if state.write is not None and not state.same(state.read(), value):
                state.write(value)
        sys.argv, sys.path[:] = argv, search
        if main is not None:
            sys.modules["__main__"] = main


def run_script(path: Path, arguments: Sequence[str], watch: Watch) -> BaseException | None:
    """Runs a script until it ends; gives the exception that it ended with."""
    code = compile(path.read_text(), str(path), "exec", dont_inherit=True)
    with WATCHING.by(watch), _as_main(path, arguments) as module:
        try:
            exec(code, module.__dict__)
        except (Exception, SystemExit) as error:
            return error
        finally:
            watch.left_out = of(LEDGER.events, Effect.UNVERIFIED)
            torchdynamo.reset()
    return None


class _TooLong(Exception):
    """A proposal does not end."""


@contextlib.contextmanager
def _at_most(seconds: float) -> Iterator[None]:
    """A block that is interrupted, where signals can do it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(*_: object) -> None:
        raise _TooLong

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@dataclass
class SourceReduction:
    """Delta debugging of a script: fewer statements, simpler expressions. It ends after `tries`, or `seconds`."""

    path: Path
    arguments: Sequence[str]
    fault: Fault
    progress: Progress
    tries: int = 500
    seconds: float = 240.0
    _tried: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._end = time.monotonic() + self.seconds

    def __call__(self) -> tuple[str, Fault] | None:
        """The smallest script that shows the fault, and how; None if the script itself does not."""
        tree = ast.parse(self.path.read_text())
        if self._shown(tree) is None:
            return None
        before = ""
        while ast.unparse(tree) != before:  # ends: each round leaves fewer statements, or shorter ones
            before = ast.unparse(tree)
            tree = self._fewer_statements(tree)
            tree = self._simpler_expressions(tree)
            tree = self._fewer_names(tree)
            self.progress(f"the script: {len(lines_of(ast.unparse(tree)))} lines left after {self._tried} tries")
        fault = self._shown(tree, always=True)
        return (ast.unparse(tree), fault) if fault is not None else None

    def _shown(self, tree: ast.Module, always: bool = False) -> Fault | None:
        """The fault, if a script still has it."""
        if not always and (self._tried >= self.tries or time.monotonic() > self._end):
            return None
        self._tried += 1
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
            path = Path(folder) / self.path.name
            text = ast.unparse(ast.fix_missing_locations(tree))
            path.write_text(text)  # capture and its messages read the lines of a file
            found = self._first_fault(path)
        if found is None or found.operator != self.fault.operator:
            return None
        return found if self.fault.finding.is_like(found.finding) else None

    def _first_fault(self, path: Path) -> Fault | None:
        """Of a script's calls; None also for one that does not end."""
        watch = Watch(Path(), lambda text: None, backend="eager")

        def run(tell: Teller) -> list[object] | None:
            run_script(path, [*self.arguments], watch)
            return watch.calls[0].row() if watch.calls else None

        if self.fault.finding.ends and possible():  # a fork for each of hundreds is for deaths alone
            found = in_child(run, _MOST_SECONDS)
            return None if found is None or isinstance(found, Death) else Fault.of(found)
        try:
            with _at_most(_MOST_SECONDS):
                run_script(path, [*self.arguments], watch)
        except _TooLong:
            return None
        return watch.calls[0] if watch.calls else None

    def _fewer_statements(self, tree: ast.Module) -> ast.Module:
        """Halves of each list of statements less, quarters, ..., one by one."""
        place = 0
        while place < len(_lists(tree)):
            holder, name = _lists(tree)[place]
            size = max(1, len(getattr(holder, name)) // 2)
            while size:
                end = len(getattr(holder, name))
                while end > 0:
                    start = max(0, end - size)
                    tree = self._try(tree, lambda new: _removed(new, place, start, end))  # noqa: B023
                    holder, name = _lists(tree)[place]
                    end = start
                size //= 2
            place += 1
        return tree

    def _simpler_expressions(self, tree: ast.Module) -> ast.Module:
        """An operand in the place of an operation, an argument in that of a call."""
        place = 0
        while place < len(list(ast.walk(tree))):
            node = list(ast.walk(tree))[place]
            for choice in range(len(_parts(node))):
                smaller = self._try(tree, lambda new: _replaced(new, place, choice))  # noqa: B023
                if smaller is not tree:
                    tree = smaller
                    break
            else:
                place += 1
        return tree

    def _fewer_names(self, tree: ast.Module) -> ast.Module:
        """What is assigned to a name, in its place: where it is read once, in the same list of statements."""
        place = 0
        while place < len(_assignments(tree)):
            smaller = self._try(tree, lambda new: _written_out(new, place))  # noqa: B023
            place += smaller is tree
            tree = smaller
        return tree

    def _try(self, tree: ast.Module, change: Callable[[ast.Module], None]) -> ast.Module:
        new = copy.deepcopy(tree)
        try:
            change(new)
            return new if self._shown(new) is not None else tree
        except Exception:  # it is no program
            return tree


def _lists(tree: ast.Module) -> list[tuple[ast.AST, str]]:
    """Where statements stand in a list."""
    return [
        (node, name)
        for node in ast.walk(tree)
        for name in _FIELDS
        if isinstance(getattr(node, name, None), list) and getattr(node, name)
    ]


def _removed(tree: ast.Module, place: int, start: int, end: int) -> None:
    holder, name = _lists(tree)[place]
    statements = getattr(holder, name)
    (only,) = statements[start:end] if end - start == 1 else (None,)
    if isinstance(only, ast.Pass):
        raise ValueError("nothing to remove")
    statements[start:end] = []
    if not statements and name == "body":
        statements.append(ast.Pass())


def _assignments(tree: ast.Module) -> list[tuple[list[ast.stmt], ast.Assign]]:
    """Values that get one name, and the lists that the statements stand in."""
    return [
        (getattr(holder, name), statement)
        for holder, name in _lists(tree)
        for statement in getattr(holder, name)
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name)
    ]


def _written_out(tree: ast.Module, place: int) -> None:
    """Raises ValueError where the name is not read exactly once behind its assignment."""
    statements, assignment = _assignments(tree)[place]
    statements.remove(assignment)
    name = assignment.targets[0].id  # type: ignore[attr-defined]
    readers = [n for s in statements for n in ast.walk(s) if isinstance(n, ast.Name) and n.id == name]
    if len(readers) != 1 or not isinstance(readers[0].ctx, ast.Load):
        raise ValueError(name)
    _put(tree, readers[0], assignment.value)


def _parts(node: ast.AST) -> list[ast.expr]:
    """Expressions that may stand for one."""
    match node:
        case ast.BinOp(left=left, right=right):
            return [left, right]
        case ast.UnaryOp(operand=operand):
            return [operand]
        case ast.IfExp(body=body, orelse=orelse):
            return [body, orelse]
        case ast.Attribute(value=value) if isinstance(value, ast.Call):
            return [value]
        case ast.Call(func=function, args=args):
            held = [function.value] if isinstance(function, ast.Attribute) else []
            return [*args, *(item for item in held if not isinstance(item, ast.Name) or args == [])]
        case _:
            return []


def _replaced(tree: ast.Module, place: int, choice: int) -> None:
    target = list(ast.walk(tree))[place]
    _put(tree, target, _parts(target)[choice])


def _put(tree: ast.Module, target: ast.AST, part: ast.expr) -> None:
    """An expression in the place of another."""
    for node in ast.walk(tree):
        for name, value in ast.iter_fields(node):
            if value is target:
                setattr(node, name, part)
                return
            if isinstance(value, list) and any(item is target for item in value):
                setattr(node, name, [part if item is target else item for item in value])
                return


def lines_of(text: str) -> list[str]:
    """A script's lines beside its imports."""
    return [line for line in text.splitlines() if line.strip() and not line.startswith(("import ", "from "))]


_FILE = '''"""A program that torchcompile runs otherwise than eager does.

{told}

Reduced by `python -m torchcompile minify` with torch {torch}.
Run it: it {shown} as long as the fault is there.
"""

import os

os.environ["TORCHCOMPILE_VERIFY"] = "1"

{text}
'''


def write_script(folder: Path, text: str, fault: Fault) -> Path:
    """Writes a reduced script, which verifies what it compiles."""
    folder.mkdir(parents=True, exist_ok=True)
    operator = "".join(c if c.isalnum() else "_" for c in fault.operator) or "program"
    path = folder / f"minified_{fault.stage}_{operator[:40]}.py"
    told = "\n".join(f"    {line}" for line in str(fault).replace("\\", "\\\\").splitlines())
    path.write_text(
        _FILE.format(
            told=told, shown=fault.finding.kind if fault.finding.ends else "raises", torch=torch.__version__, text=text
        )
    )
    return path
