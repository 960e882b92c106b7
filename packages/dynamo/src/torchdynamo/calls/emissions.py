"""What the program says to the outside while it runs: log records and warnings, said again at every call.

They come after the graph and the writes of the same part of the program, in their order, as from the line that made
them. What a handler of them does is not seen by the program itself. Where it filters warnings
(`with warnings.catch_warnings()`), the filters hold for what torch says during capture, and again around what is said
at each call.
"""

from __future__ import annotations

import copy
import functools
import logging
import re
import sys
import types
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from primtorch.frozen import record
from torchdynamo.calls import torch_calls
from torchdynamo.graph.run_time_texts import RunTimeText, holds_run_time
from torchdynamo.graph.scalars import SYMBOLIC
from torchdynamo.interpreter.exceptions import FOLDER
from torchdynamo.interpreter.protocol import MISSING, Args, Callee, InterpreterApi, Kwargs, Rule, World
from torchdynamo.outside.externals import CONSTANT_TYPES, IDENTITY_TYPES
from torchdynamo.outside.outside import Outside
from torchdynamo.outside.overlays import MISSING as UNWRITTEN
from torchdynamo.reasons import BreakGraph


@record
class Emission:
    """A call that says something and whose result nobody asks for. The function itself is held by the compiled code."""

    function: Callable[..., object]
    args: Args
    kwargs: Kwargs
    filters: bool = False  # it says nothing: it changes how warnings are filtered


@record
class Place:
    """A line of the captured program, or of what called it."""

    file: str
    line: int
    function: str
    namespace: dict[str, Any]


class Emissions:
    """The emissions of one capture, as rules of calls."""

    def __init__(self, outside: Outside, world: World, interpreter: InterpreterApi) -> None:
        self.outside = outside
        self.world = world
        self.interpreter = interpreter
        self.made: list[Emission] = []
        self._open: list[
            tuple[object, warnings.catch_warnings[Any]]
        ] = []  # the program's contexts, what stands for each

    def rules(self) -> tuple[tuple[object, Rule], ...]:
        """The functions that say something, and what calls of them mean."""
        return (
            *((function, self.log) for function in torch_calls.LOG_LEVELS),
            *((function, self.ask) for function in torch_calls.LOG_QUESTIONS),
            (logging.getLogger, self.get_logger),
            (print, self.print),
            (warnings.warn, self.warn),
            (warnings.catch_warnings.__enter__, self.enter_filters),
            (warnings.catch_warnings.__exit__, self.exit_filters),
            *((function, self.filter) for function in torch_calls.WARNING_FILTERS),
        )

    def close(self) -> None:
        """Capture ends: the filters are again what they were."""
        while self._open:
            self._open.pop()[1].__exit__(None, None, None)

    # -- logging ----------------------------------------------------------------------------

    def get_logger(self, fn: Callee, args: Args, kwargs: Kwargs) -> object:
        """The program's own logger."""
        logger = fn(*args, **kwargs)
        return self.outside.externals.hold(logger, "logger")

    def ask(self, fn: Callee, args: Args, kwargs: Kwargs) -> object:
        """Whether a logger is enabled, and the like."""
        if kwargs or self.outside.externals.lookup(args[0]) is None:
            return MISSING
        return self.outside.ambient(fn, args)

    def log(self, fn: Callee, args: Args, kwargs: Kwargs) -> object:
        """A method of a logger, or the function of `logging` by its name."""
        level = torch_calls.LOG_LEVELS[fn]
        if not isinstance(args[0] if args else None, logging.Logger):
            logger, at_root = self.get_logger(logging.getLogger, (), {}), True
        else:
            logger, args, at_root = args[0], args[1:], False
        if level is None:
            level, args = (args[0], args[1:]) if args else (None, ())
        if not args or kwargs.keys() - _LOG_KEYWORDS or type(level) is not int:
            raise BreakGraph("c_function", f"{fn.__name__}() of a logger with other arguments than its own")
        message = args[0]
        if kwargs.get("exc_info") or kwargs.get("stack_info"):
            raise BreakGraph("exception", f"{fn.__name__}() of a logger shows where the program is")
        if self.outside.externals.lookup(logger) is None or _logs_its_own_way(type(logger)):
            raise BreakGraph("c_function", f"{fn.__name__}() of a {type(logger).__qualname__}")
        said = _frozen(args[1:])
        if said is MISSING or _frozen(message) is MISSING:
            if not self.outside.ambient(logging.Logger.isEnabledFor, (logger, level)):
                return None
            message, said = "%s", (self._text(message, args[1:]),)
        where = self._place(int(kwargs.get("stacklevel", 1)), _LOGGING)
        self.do(functools.partial(_log_at, where, at_root), (logger, level, message, said, kwargs.get("extra")))
        return None

    def _text(self, message: object, args: Args) -> str:
        """The message as it is now, of objects that may change until it is said."""
        text = self.world.convert(message, "str")
        if not args:
            return text
        named = len(args) == 1 and isinstance(args[0], Mapping) and args[0]
        return str(self.world.binary("%", text, named or args))

    # -- print --------------------------------------------------------------------------------

    def print(self, fn: Callee, args: Args, kwargs: Kwargs) -> None:
        """`print` of numbers and texts of which some are known only at each call. Another breaks the graph, and is
        seen at once."""
        said = _frozen((args, dict(kwargs)))
        redirected = self.outside.overlays.read(sys.__dict__, "stdout", "global") is not UNWRITTEN
        if said is MISSING or not holds_run_time(said) or redirected or kwargs.keys() - {"sep", "end", "flush"}:
            raise BreakGraph("print", "call of builtins.print")
        self.do(fn, *said)  # type: ignore[misc]

    # -- warnings ---------------------------------------------------------------------------

    def warn(self, fn: Callee, args: Args, kwargs: Kwargs) -> None:
        """`warnings.warn(message, category, stacklevel)`, from the line of the program that it names."""
        given = dict(zip(("message", "category", "stacklevel", "source"), args, strict=False)) | kwargs
        if given.keys() - {"message", "category", "stacklevel"}:
            raise BreakGraph("c_function", f"warnings.warn({', '.join(given)})")
        message, category = given.get("message"), given.get("category") or UserWarning
        later = message if isinstance(message, RunTimeText) else None
        if later is not None and later.native is not str:
            later.need()
        category = type(message) if isinstance(message, Warning) else category
        refused = not isinstance(category, type) or not issubclass(category, Warning)
        if "message" not in given or refused or not isinstance(message, (str, Warning, RunTimeText)):
            fn(*args, **kwargs)  # says what is wrong
            return
        where = self._place(int(given.get("stacklevel", 1)), ())
        known = where if isinstance(where, Place) else caller(where, ())
        question = (None if later is not None else str(message), category, _module_name(known), known.line)
        if is_error(*question) if self._open else self.outside.ambient(is_error, question):
            if later is not None:
                later.need()
            raise message if isinstance(message, Warning) else category(message)
        self._collected()
        self.do(functools.partial(_warn_at, where), (message, category))

    def _collected(self) -> None:
        """A list into which `catch_warnings(record=True)` collects is filled behind the graph: too late for a program
        that has it at hand."""
        collect = warnings._showwarnmsg_impl  # type: ignore[attr-defined]
        log = collect.__self__ if isinstance(collect, types.BuiltinMethodType) else None
        if type(log) is list:
            if id(log) in self.outside.externals.by_original:
                raise BreakGraph("ambient_state", "a warning for a list that the program has read")
            self.outside.externals.written_behind = log

    def enter_filters(self, fn: Callee, args: Args, kwargs: Kwargs) -> None:
        """`with warnings.catch_warnings()`: its own object is entered at each call, another one now."""
        context = args[0]
        if context._record or context._module is not warnings:
            raise BreakGraph("ambient_state", "warnings.catch_warnings() that collects what is said")
        entered = copy.copy(context)
        fn(entered)
        self._open.append((context, entered))
        self.do(fn, (context,), filters=True)

    def exit_filters(self, fn: Callee, args: Args, kwargs: Kwargs) -> None:
        """The end of `warnings.catch_warnings()`: filters are what they were."""
        context = args[0]
        begun = next((i for i, made in enumerate(self.made) if made.args and made.args[0] is context), None)
        if begun is not None:
            self._open.pop()[1].__exit__(None, None, None)
            if all(made.filters for made in self.made[begun:]):  # nothing was said in between
                del self.made[begun:]
                return
        elif context._record:
            raise BreakGraph("ambient_state", "the end of warnings.catch_warnings() that collects what is said")
        self.do(fn, (context, None, None, None), filters=True)

    def filter(self, fn: Callee, args: Args, kwargs: Kwargs) -> None:
        """A new filter holds from where it is made; inside of a block of the program's, during capture too."""
        if self._open:
            fn(*args, **kwargs)
        self.do(fn, args, kwargs, filters=True)

    # -- where and what ---------------------------------------------------------------------

    def do(
        self, function: Callable[..., object], args: Args, kwargs: Kwargs | None = None, filters: bool = False
    ) -> None:
        """A call that is made behind the graph, in its turn, at each call."""
        self.made.append(Emission(function, args, dict(kwargs or {}), filters))
        self.outside.emitted = len(self.made)

    def _place(self, level: int, passed: tuple[str, ...]) -> Place | int:
        """The frame that is `level` frames up, without those in the files `passed`; or how far above the program."""
        for frame in reversed(self.interpreter.frames):
            code = frame.function.__code__
            level -= code.co_filename not in passed
            if level <= 0:
                return Place(code.co_filename, frame.position.line, code.co_name, frame.function.__globals__)
        return level


_LOG_KEYWORDS = {"exc_info", "stack_info", "stacklevel", "extra"}
_LOGGING = (str(logging._srcfile),)


def _logs_its_own_way(kind: type) -> bool:
    """Whether a class of loggers replaces what this module does in the place of `Logger`."""
    return any(getattr(kind, name) is not getattr(logging.Logger, name) for name in ("_log", "findCaller"))


def _frozen(value: Any) -> object:
    """A value as it is now, for containers a copy; MISSING when its text may change until it is said."""
    kind = type(value)
    if kind in (list, tuple, set, frozenset):
        parts = list(map(_frozen, value))
        return MISSING if any(part is MISSING for part in parts) else kind(parts)
    if kind is dict:
        keys, parts = list(map(_frozen, value)), list(map(_frozen, value.values()))
        return MISSING if any(part is MISSING for part in (*keys, *parts)) else dict(zip(keys, parts, strict=True))
    return value if kind in CONSTANT_TYPES or isinstance(value, (*SYMBOLIC, RunTimeText, *IDENTITY_TYPES)) else MISSING


# -- at each call ------------------------------------------------------------------------------


def caller(level: int, passed: tuple[str, ...]) -> Place:
    """The frame `level` frames up from the compiled function, 1 being that of its call."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        level -= not file.startswith(_OWN_FILES) and file not in passed
        if level <= 0:
            return Place(file, frame.f_lineno, frame.f_code.co_name, frame.f_globals)
        frame = frame.f_back
    return Place("<sys>" if sys.version_info >= (3, 13) else "sys", 0, "", sys.__dict__)


_OWN_FILES = (FOLDER, "<torchdynamo ")


def _log_at(
    where: Place | int,
    at_root: bool,
    logger: logging.Logger,
    level: int,
    message: object,
    args: Args,
    extra: Mapping[str, object] | None,
) -> None:
    """`logger.log(level, message, *args)` from the line `where`; `at_root`: by the function of `logging` itself."""
    if at_root and not logger.handlers:
        logging.basicConfig()
    if logger.isEnabledFor(level):
        place = where if isinstance(where, Place) else caller(where, _LOGGING)
        text = (place.file, place.line, message, args, None, place.function, extra)
        logger.handle(logger.makeRecord(logger.name, level, *text))


def _warn_at(where: Place | int, message: str | Warning, category: type[Warning]) -> None:
    place = where if isinstance(where, Place) else caller(where, ())
    registry = place.namespace.setdefault("__warningregistry__", {})  # of what was said already, by place
    warnings.warn_explicit(message, category, place.file, place.line, _module_name(place), registry)


def _module_name(place: Place) -> str:
    return str(place.namespace.get("__name__", "<string>"))


def is_error(text: str | None, category: type[Warning], module: str, line: int) -> bool:
    """Whether the filters of warnings make an exception of this one; of a text that is not known yet (None), whether
    there is one that may."""
    for action, message, kind, where, at in warnings.filters:
        if at not in (0, line) or not issubclass(category, kind):
            continue
        may_fit = message is None or action == "error" if text is None else _fits(message, text)
        if may_fit and _fits(where, module):
            return action == "error"
    return bool(warnings.defaultaction == "error")  # type: ignore[attr-defined]


def _fits(pattern: str | re.Pattern[str] | None, text: str) -> bool:
    return pattern is None or (pattern == text if isinstance(pattern, str) else pattern.match(text) is not None)
