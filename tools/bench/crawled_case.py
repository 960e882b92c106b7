"""One crawled module: eager beside this stack (and torch.compile's capture), each in a process of its own.

The module and its inputs are made once; every run is a fork from there, so that all begin with the same parameters
(uninitialised ones too), random states and globals, and none sees what another left behind.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import os
import pickle
import random
import resource
import signal
import sys
import tempfile
import threading
import time
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy
import torch
from crawled_files import load
from drawn_rounding import DRAWS, DrawnRounding
from pool import Row, told

CALLS = 2
ULPS = 4
# Of a value's largest element, in float64: what a compiled sum or contraction may differ from eager's.
IN_DOUBLE = 1e-9
# Of an error in float32, what is left of it in float64 where it is rounding: units in the last place differ by 2^29,
# and rounding is as chance has it. What is computed wrongly is as wrong in either.
SHRINKS_TO = 2.0**-29 * 64
DEPTH = 6


@dataclass
class Run:
    """What a run gave. Values are (place, tensor or text): results, gradients, inputs and state afterwards."""

    calls: list[list[tuple[str, Any]]] = field(default_factory=list)
    gradients: list[list[tuple[str, Any]]] = field(default_factory=list)
    backward_errors: list[str] = field(default_factory=list)
    after: list[tuple[str, Any]] = field(default_factory=list)
    ambient: dict[str, Any] = field(default_factory=dict)
    failure: str | None = None
    facts: Row = field(default_factory=dict)
    seconds: float = 0.0


# -- what a value is ---------------------------------------------------------------------------


class Walk:
    """Flattens objects to (place, tensor or text); a tensor's text says what it shares its memory with."""

    def __init__(self, inputs: Mapping[int, str]) -> None:
        self.found: list[tuple[str, Any]] = []
        self.memory = dict(inputs)
        self.seen: set[int] = set()

    def walk(self, value: Any, place: str, depth: int = 0) -> None:
        if isinstance(value, torch.Tensor):
            self.tensor(value, place)
        elif isinstance(value, numpy.ndarray | numpy.generic) and value.dtype.kind in "fiub":
            self.found.append((place, torch.from_numpy(numpy.array(value))))
        elif isinstance(value, bool | int | str | None | torch.dtype | torch.device):
            self.found.append((place, f"{type(value).__name__} {value!r}"[:2000]))
        elif isinstance(value, float):
            self.found.append((place, torch.tensor(value, dtype=torch.float64)))
        elif id(value) in self.seen or depth > DEPTH:
            self.found.append((place, type(value).__name__))
        else:
            self.seen.add(id(value))
            self.inside(value, place, depth)

    def tensor(self, value: torch.Tensor, place: str) -> None:
        if value.layout is not torch.strided:
            self.found.append((place, value.detach().to_dense().clone()))
            return
        with contextlib.suppress(RuntimeError):
            owner = self.memory.setdefault(value.untyped_storage().data_ptr(), place) if value.numel() else place
            strides = tuple(
                s for s, size in zip(value.stride(), value.shape, strict=True) if size > 1 and value.numel()
            )
            shared = f"{place} in the memory of {owner}, grad {value.requires_grad}, strides {strides}"
            self.found.append((f"{place} is", shared))
        self.found.append((place, value.detach().clone()))

    def inside(self, value: Any, place: str, depth: int) -> None:
        self.found.append((f"{place} type", type(value).__name__))
        if isinstance(value, Mapping):
            for key, part in list(value.items()):
                self.walk(part, f"{place}[{key!r:.80}]", depth + 1)
        elif isinstance(value, list | tuple):
            for index, part in enumerate(value):
                self.walk(part, f"{place}[{index}]", depth + 1)
        elif isinstance(value, set | frozenset):
            self.found.append((place, str(len(value))))
        elif isinstance(value, type | types.ModuleType) or (callable(value) and not isinstance(value, torch.nn.Module)):
            self.found.append((place, getattr(value, "__qualname__", "")))
        elif hasattr(value, "__dict__"):
            for key, part in list(vars(value).items()):
                if "hooks" not in key:
                    self.walk(part, f"{place}.{key}", depth + (not isinstance(value, torch.nn.Module)))


def ambient() -> dict[str, Any]:
    """The process's state that a program may read."""
    digest = lambda data: hashlib.sha1(data).hexdigest()[:12]
    return {
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "autocast dtype": str(torch.get_autocast_dtype("cpu")),
        "default dtype": str(torch.get_default_dtype()),
        "default device": str(torch.get_default_device()),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "anomaly mode": torch.is_anomaly_enabled(),
        "threads": torch.get_num_threads(),
        "matmul precision": torch.get_float32_matmul_precision(),
        "cudnn": (torch.backends.cudnn.enabled, torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic),
        "function modes": torch._C._len_torch_function_stack(),
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
        "torch's random state": digest(torch.get_rng_state().numpy().tobytes()),
        "random's state": digest(repr(random.getstate()).encode()),
        "numpy's random state": digest(pickle.dumps(numpy.random.get_state())),
        "recursion limit": sys.getrecursionlimit(),
        "trace": (sys.gettrace(), sys.getprofile(), threading.gettrace(), threading.getprofile()),
        "environment": digest(repr(sorted(os.environ.items())).encode()),
        "folder": os.getcwd(),
        "interrupt handler": str(signal.getsignal(signal.SIGINT)),
        "garbage collection": gc.isenabled(),
    }


# -- running -----------------------------------------------------------------------------------


class Program:
    """A module with its inputs."""

    def __init__(self, folder: Path, case: Row) -> None:
        seed_all(case["seed"])
        self.seed = case["seed"]
        cls, init, inputs = load(folder, case["module"])
        args, kwargs = init()
        self.module = cls(*args, **kwargs).train(case["train"])
        self.args, self.kwargs = inputs()

    def to_double(self) -> None:
        self.module.double()
        self.args, self.kwargs = mapped(self.args, to_double), mapped(self.kwargs, to_double)

    def ask_gradients(self) -> None:
        mapped((self.args, self.kwargs), lambda t: t.requires_grad_() if t.is_floating_point() and t.is_leaf else t)

    def execute(self, candidate: Callable[..., Any], into: Run) -> None:
        """Calls, each with its backward, then what they left behind."""
        for call in range(CALLS):
            seed_all(self.seed + 1)
            try:
                out = candidate(*self.args, **self.kwargs)
            except Exception as error:
                into.failure = f"call {call}: {told(error)}"
                return
            walk = Walk(self.memory())
            walk.walk(out, "result")
            into.calls.append(walk.found)
            seed_all(self.seed + 2)
            try:
                into.gradients.append(self.gradients(out))
            except Exception as error:
                into.backward_errors.append(told(error))
                into.gradients.append([])
        into.ambient = ambient()
        walk = Walk({})
        walk.walk((self.args, self.kwargs), "input")
        walk.walk(self.module, "module")
        into.after = walk.found

    def memory(self) -> dict[int, str]:
        """Where memory that the caller holds comes from."""
        held: dict[int, str] = {}
        for name, tensor in [*self.module.named_parameters(), *self.module.named_buffers()]:
            with contextlib.suppress(RuntimeError):
                held.setdefault(tensor.untyped_storage().data_ptr(), name)
        walk: list[torch.Tensor] = []
        mapped((self.args, self.kwargs), walk.append)
        for index, tensor in enumerate(walk):
            with contextlib.suppress(RuntimeError):
                held.setdefault(tensor.untyped_storage().data_ptr(), f"input {index}")
        return held

    def gradients(self, out: Any) -> list[tuple[str, Any]]:
        leaves: list[torch.Tensor] = []
        mapped(out, leaves.append)
        roots = [t for t in leaves if t.requires_grad and t.layout is torch.strided and t.dtype.is_floating_point]
        generator = torch.Generator().manual_seed(self.seed)
        tangents = [torch.randn(t.shape, generator=generator).to(t.dtype) for t in roots]
        inputs: list[torch.Tensor] = []
        mapped((self.args, self.kwargs), inputs.append)
        targets = [*self.module.named_parameters(), *((f"input {i}", t) for i, t in enumerate(inputs) if t.is_leaf)]
        if roots:
            torch.autograd.backward(roots, tangents)
        found = [(f"gradient of {name}", None if t.grad is None else t.grad.clone()) for name, t in targets]
        for _, tensor in targets:
            tensor.grad = None
        return [(name, "no gradient" if grad is None else grad) for name, grad in found]


def mapped(value: Any, f: Callable[[torch.Tensor], Any]) -> Any:
    """`f` of every tensor in containers and in plain objects' attributes."""
    if isinstance(value, torch.Tensor):
        return f(value)
    if isinstance(value, Mapping):
        pairs = {key: mapped(part, f) for key, part in value.items()}
        return type(value)(pairs) if type(value) in (dict, types.MappingProxyType) else pairs
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(mapped(part, f) for part in value))
    if isinstance(value, list | tuple):
        return type(value)(mapped(part, f) for part in value) if type(value) in (list, tuple) else value
    return value


def to_double(value: torch.Tensor) -> torch.Tensor:
    return value.detach().double() if value.is_floating_point() else value


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed % 2**32)


def ours(module: torch.nn.Module, run: Run) -> tuple[Callable[..., Any], Callable[[], None]]:
    import torchcompile

    def told_of(events: Iterable[Any]) -> list[str]:
        return sorted({f"{event.kind.id}: {event.what}: {event.detail}"[:300] for event in events})

    def close() -> None:
        report = torchcompile.report()
        run.facts = {
            "graphs": report.captured,
            "breaks": [[e.count, e.kind.id, e.where.rsplit("/", 1)[-1], e.detail[:200]] for e in report.breaks],
            "fallbacks": told_of(report.fallbacks),
            "mended": told_of(report.mended),
            "reruns": told_of(report.reruns),
            "recompiles": told_of(report.recompiles),
        }

    return torchcompile.compile(module, options={"eager_random": True}), close


def peer(module: torch.nn.Module, run: Run) -> tuple[Callable[..., Any], Callable[[], None]]:
    graphs = [0]

    def backend(graph: Any, inputs: Any) -> Any:
        graphs[0] += 1
        return graph.forward

    def close() -> None:
        counters = __import__("torch._dynamo.utils", fromlist=["counters"]).counters
        found = counters["graph_break"]
        run.facts = {
            "graphs": graphs[0],
            "breaks": sum(found.values()),
            "reasons": [reason.strip().splitlines()[0][:100] for reason in found][:3],
        }

    return torch.compile(module, backend=backend), close


def alone(module: torch.nn.Module, run: Run) -> tuple[Callable[..., Any], Callable[[], None]]:
    return module, lambda: None


Change = Literal["", "double", "rounding"]
COMPILERS = {"eager": alone, "ours": ours, "peer": peer}


def in_child(program: Program, compiler: str, case: Row, change: Change = "") -> Run:
    """A run in a fork of this process, with limits of time and memory, of the program or of a changed one."""
    with tempfile.NamedTemporaryFile() as file:
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                _limit_memory(case["memory"])
                _run(program, compiler, change, case, file.name)
                status = 0
            finally:
                os._exit(status)
        deadline = time.monotonic() + case["run_seconds"]
        while True:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                break
            if time.monotonic() > deadline:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                return Run(failure=f"longer than {case['run_seconds']:.0f} s")
            time.sleep(0.005)
        try:
            return torch.load(file.name, weights_only=False)
        except Exception:
            how = f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"status {os.WEXITSTATUS(status)}"
            return Run(failure=f"crashed: the process ended with {how}")


def _run(program: Program, compiler: str, change: Change, case: Row, path: str) -> None:
    run = Run()
    try:
        if change == "double":
            program.to_double()
        if case["gradients"]:
            program.ask_gradients()
        candidate, close = COMPILERS[compiler](program.module, run)
        began = time.perf_counter()
        with DrawnRounding(case["draw"]) if change == "rounding" else contextlib.nullcontext():
            program.execute(candidate, run)
        run.seconds = time.perf_counter() - began
        close()
    except Exception as error:
        run.failure = run.failure or told(error)
    torch.save(run, path)


def _limit_memory(mib: int) -> None:
    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limit = held + mib * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


# -- judging -----------------------------------------------------------------------------------


def stages(run: Run, gradients: bool) -> list[tuple[str, Any]]:
    found = []
    for index, call in enumerate(run.calls):
        found += [(f"call {index} {place}", value) for place, value in call]
        if gradients and index < len(run.gradients):
            found += [(f"call {index} {place}", value) for place, value in run.gradients[index]]
    return found + run.after


def deviation(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest difference of an element; infinite where shapes, dtypes or non-finites are not the same."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return float("inf")
    if torch.equal(a, b) or not a.numel():
        return 0.0
    if not (a.is_floating_point() or a.is_complex()):
        return float("inf")
    wide = torch.complex128 if a.is_complex() else torch.float64
    a, b = a.to(wide), b.to(wide)
    finite = a.isfinite()
    if not torch.equal(finite, b.isfinite()):
        return float("inf")
    if not torch.equal(torch.nan_to_num(a[~finite]), torch.nan_to_num(b[~finite])):
        return float("inf")
    return float((a[finite] - b[finite]).abs().max()) if finite.any() else 0.0


def largest(value: torch.Tensor) -> float:
    """The largest finite element, by its absolute value."""
    finite = value[value.isfinite()] if value.is_floating_point() or value.is_complex() else value[:0]
    return float(finite.abs().max()) if finite.numel() else 0.0


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest difference of an element, of the largest element."""
    apart = deviation(a, b)
    return apart / max(largest(a), 1e-300) if apart else 0.0


def differing(eager: Run, found: Run, bound: float) -> list[tuple[str, Any, Any]]:
    """(place, eager's value, the other) of what differs by more than the bound, relative; "nothing" for no value."""
    backward = not eager.backward_errors
    if backward and found.backward_errors:
        return [("backward", "nothing", f"raises {found.backward_errors[0]}")]
    expected, given = stages(eager, backward), dict(stages(found, backward))
    out = []
    for place, value in expected:
        other = given.pop(place, "nothing")
        if isinstance(value, torch.Tensor) and isinstance(other, torch.Tensor):
            same = distance(value, other) <= bound
        else:
            same = type(value) is type(other) and value == other
        if not same:
            out.append((place, value, other))
    return out + [(place, "nothing", value) for place, value in given.items()]


def differences(eager: Run, found: Run, bound: float) -> list[str]:
    """What differs by more than the bound, in words."""
    return [f"{place}: {difference(value, other)}" for place, value, other in differing(eager, found, bound)]


def difference(value: Any, other: Any) -> str:
    if not (isinstance(value, torch.Tensor) and isinstance(other, torch.Tensor)):
        return f"{describe(other)} for {describe(value)}"
    shape = "" if value.shape == other.shape else f", here {list(other.shape)}"
    return f"error {distance(value, other):.1e} of {str(value.dtype)[6:]} {list(value.shape)}{shape}"


def describe(value: Any) -> str:
    return f"tensor {list(value.shape)}" if isinstance(value, torch.Tensor) else str(value)[:160]


def ulps(value: torch.Tensor) -> float:
    dtype = value.dtype if value.dtype in (torch.float16, torch.bfloat16, torch.float64) else torch.float32
    return ULPS * torch.finfo(dtype).eps


def kind_of(failure: str) -> str:
    return "crashed" if "crashed" in failure else "slow" if "longer" in failure else "raises"


def judge(program: Program, case: Row, eager: Run, found: Run) -> tuple[str, str]:
    """(verdict, detail): right, wrong, raises, crashed, slow, ambient, or unsteady: eager differs from itself."""
    if found.failure:
        return kind_of(found.failure), found.failure
    verdict, detail = "right", ""
    if differences(eager, found, ULPS * torch.finfo(torch.float32).eps):
        verdict, detail = judge_rounding(program, case, eager, found)
    other = [f"{k}: {found.ambient.get(k)} for {v}" for k, v in eager.ambient.items() if found.ambient.get(k) != v]
    return ("ambient", "; ".join(other)) if other and verdict == "right" else (verdict, detail)


Difference = tuple[str, Any, Any]  # place, eager's value, the other


def judge_rounding(program: Program, case: Row, eager: Run, found: Run) -> tuple[str, str]:
    """Whether each value that differs in float32 differs by rounding alone: it is as near to float64 as eager is; or no
    farther from eager than eager with other rounding errors; or the difference goes where there are more digits."""
    left = differing(eager, found, ULPS * torch.finfo(torch.float32).eps)
    detail = f"{left[0][0]}: {difference(*left[0][1:])}"
    if all(is_rounded(value, other) for _, value, other in left):
        truth = in_child(program, "eager", case, "double")
        if truth.failure is None:
            left = farther_than_twice(left, truth)
            if not left:
                return "right", "at most twice eager's error"
        left = beyond_other_rounding(left, program, case)
        if not left:
            return "right", "at most twice what other rounding does to eager"
        if truth.failure is None:
            in_double = in_child(program, "ours", case, "double")
            if in_double.failure:
                return kind_of(in_double.failure), f"in float64: {in_double.failure}"
            left = different_in_double(left, truth, in_double)
            if not left:
                return "right", "as eager in float64"
        detail = f"{left[0][0]}: {difference(*left[0][1:])}"
    again = differences(eager, in_child(program, "eager", case), 0.0)
    return ("unsteady", again[0]) if again else ("wrong", detail)


def is_rounded(value: Any, other: Any) -> bool:
    """Whether two values are tensors of one kind, whose elements are rounded numbers."""
    if not (isinstance(value, torch.Tensor) and isinstance(other, torch.Tensor)):
        return False
    return value.shape == other.shape and value.dtype is other.dtype and value.is_floating_point()


def farther_than_twice(left: list[Difference], truth: Run) -> list[Difference]:
    """What is more than twice as far from the float64 run as eager's value is (and a few ulps)."""
    exact = dict(stages(truth, True))

    def near(place: str, value: torch.Tensor, other: torch.Tensor) -> bool:
        right = exact.get(place)
        if not isinstance(right, torch.Tensor) or right.shape != value.shape:
            return False
        theirs, mine = (distance(right, t.to(right.dtype)) for t in (value, other))
        return mine <= 2 * theirs + ulps(value)

    return [one for one in left if not near(*one)]


def beyond_other_rounding(left: list[Difference], program: Program, case: Row) -> list[Difference]:
    """What is more than twice as far from eager's value as those of eager's runs with drawn rounding errors are."""
    spread: dict[str, float] = {}
    for draw in range(DRAWS):
        run = in_child(program, "eager", {**case, "draw": case["seed"] + draw}, "rounding")
        given = {} if run.failure else dict(stages(run, True))
        for place, value, _ in left:
            if is_rounded(value, given.get(place)):
                spread[place] = max(spread.get(place, 0.0), distance(value, given[place]))
        left = [
            (place, value, other)
            for place, value, other in left
            if not distance(value, other) <= 2 * spread.get(place, 0.0) + ulps(value)
        ]
        if run.failure or not left:
            break
    return left


def different_in_double(left: list[Difference], truth: Run, in_double: Run) -> list[Difference]:
    """What float64 does not make equal but for rounding errors of float64. Those are judged by the value's largest
    element or, where terms cancel to next to nothing, by the errors in float32."""
    exact, compiled = dict(stages(truth, True)), dict(stages(in_double, True))

    def same(place: str, value: torch.Tensor, other: torch.Tensor) -> bool:
        right, found = exact.get(place), compiled.get(place)
        if not is_rounded(right, found) or right.shape != value.shape:
            return False
        in_single = max(deviation(right, t.to(right.dtype)) for t in (value, other))
        return distance(right, found) <= IN_DOUBLE or deviation(right, found) <= SHRINKS_TO * in_single

    return [one for one in left if not same(*one)]


def measure(case: Row, send: Callable[[Row], None]) -> None:
    """Sends one row: whether eager runs the module, what this stack makes of it, what torch.compile captures, and how
    many seconds of a processor each of these took."""
    torch.set_num_threads(1)
    took: dict[str, float] = {}

    @contextlib.contextmanager
    def timed(what: str) -> Iterator[None]:
        began = sum(os.times()[:4])  # of this process and of those that it has waited for
        try:
            yield
        finally:
            took[what] = round(took.get(what, 0.0) + sum(os.times()[:4]) - began, 3)

    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            with timed("made"):
                program = Program(Path(case["folder"]), case)
        except BaseException as error:
            return send({"eager": f"not made: {told(error)}", "took": took})
        for case["gradients"] in (True, False):
            with timed("eager"):
                eager = in_child(program, "eager", case)
            if not eager.failure:
                break
        else:
            return send({"eager": f"raises: {eager.failure}", "took": took})
        with timed("compiled"):
            found = in_child(program, "ours", case)
        with timed("judged"):
            verdict, detail = judge(program, case, eager, found)
        row = {"eager": "runs", "verdict": verdict, "detail": detail[:600], **found.facts, "took": took}
        row |= {"backward": (eager.backward_errors or [""])[0]}
        if case["peer"]:
            with timed("peer"):
                run = in_child(program, "peer", case)
            row["peer"] = {"failure": run.failure, **run.facts}
        send(row)
        os.chdir("/")
