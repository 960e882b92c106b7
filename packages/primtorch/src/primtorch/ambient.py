"""Ambient state: what operators, autograd and torch's Python code read besides their arguments.

Whoever runs a program for another purpose than its result (capture, tracing, a compiler) does so within `preserved()`:
the program's own changes are seen by what follows in it, and are undone however it ends. `AMBIENT` is the table of what
is looked after, each state with its reader and its writer.
"""

from __future__ import annotations

import functools
import operator
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, TypeAlias

import torch
import torch.utils._device as default_device
from torch.autograd import forward_ad

from primtorch.frozen import record
from primtorch.withheld import Withheld

_C: Any = torch._C
_deterministic: Any = torch.utils.deterministic


@record
class Ambient:
    """One state of the thread or the process. Without `write`, it is held by blocks of C++ that end with their frame:
    nothing that runs within a Python call can leave it changed."""

    name: str
    read: Callable[[], object]
    write: Callable[[Any], None] | None = None
    same: Callable[[Any, Any], bool] = operator.eq
    shared: bool = False  # of the process, and set by calls that are noted: what is not noted, another thread has done


def _switch(name: str, getter: str, setter: str, shared: bool = True) -> tuple[Ambient, ...]:
    """A state that torch._C has a reader and a writer of; none where this build of torch lacks them."""
    read, write = getattr(_C, getter, None), getattr(_C, setter, None)
    return () if read is None or write is None else (Ambient(name, read, write, shared=shared),)


_cudnn = Withheld(_C._get_cudnn_enabled, _C._set_cudnn_enabled)


def without_cudnn() -> AbstractContextManager[None]:
    """A block in which operators take no kernels of cuDNN, in all threads. Nothing is done where torch has none."""
    return _cudnn.off() if torch.backends.cudnn.is_available() else nullcontext()


_onednn = Withheld(_C._get_mkldnn_enabled, _C._set_mkldnn_enabled)


def without_onednn() -> AbstractContextManager[None]:
    """A block in which operators take no kernels of oneDNN, in all threads."""
    return _onednn.off()


_IN_AND_OUT: tuple[Callable[[], int], ...] = (torch.autocast_increment_nesting, torch.autocast_decrement_nesting)


def _autocast_nesting() -> int:
    """How many blocks of autocast are open. Only entering one tells, and no signal's handler may come in between: it
    would leave the thread within a block that never ends, whose casts of weights are never made again."""
    return tuple(map(operator.call, _IN_AND_OUT))[1]  # no line of Python runs between the two


def _set_autocast_nesting(depth: int) -> None:
    now = _autocast_nesting()
    for _ in range(now, depth):
        torch.autocast_increment_nesting()
    for _ in range(depth, now):
        torch.autocast_decrement_nesting()


AutocastState: TypeAlias = tuple[tuple[str, bool, torch.dtype], ...]
"""Of each kind of device, whether autocast is on, and to which dtype."""


def autocast_state() -> AutocastState:
    """Of each device: its type, whether autocast is on, and its dtype."""
    return tuple((d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in AUTOCAST_DEVICES)


def set_autocast_state(casts: AutocastState) -> None:
    """Puts back what `autocast_state` gave."""
    for device, enabled, dtype in casts:
        torch.set_autocast_enabled(device, enabled)
        torch.set_autocast_dtype(device, dtype)


def _known_to_autocast(device: str) -> bool:
    return bool(_C._is_autocast_available(device))


AUTOCAST_DEVICES = tuple(filter(_known_to_autocast, ("cpu", "cuda", "xpu", "mps", "hpu", "mtia", "xla")))


def _stack(length: Callable[[], int], at: Callable[[int], object]) -> tuple[object, ...]:
    return tuple(at(place) for place in range(length()))


def function_modes() -> tuple[object, ...]:
    """The torch-function modes that are on, the innermost last."""
    return _stack(_C._len_torch_function_stack, _C._get_function_stack_at)


def dispatch_modes() -> tuple[object, ...]:
    """The torch-dispatch modes that are on, those of torch's own machinery first, the innermost last."""
    return _stack(_C._len_torch_dispatch_stack, _C._get_dispatch_stack_at)


def _same_objects(a: Sequence[object], b: Sequence[object]) -> bool:
    return len(a) == len(b) and all(map(operator.is_, a, b))


def _set_stack(
    now: Sequence[object], wanted: Sequence[object], pop: Callable[[], object], push: Callable[[object], None]
) -> None:
    shared = 0
    while shared < min(len(now), len(wanted)) and now[shared] is wanted[shared]:
        shared += 1
    for _ in now[shared:]:
        pop()
    for mode in wanted[shared:]:
        push(mode)


def _set_function_modes(modes: Sequence[object]) -> None:
    _set_stack(function_modes(), modes, _C._pop_torch_function_stack, _C._push_on_torch_function_stack)


def _of_programs(modes: Sequence[object]) -> Sequence[object]:
    """Those that lie on the stack itself: behind torch's own, which have places of their own."""
    own = sum(_C._get_dispatch_mode(key) is not None for key in _C._TorchDispatchModeKey.__members__.values())
    return modes[own:]


def _set_dispatch_modes(modes: Sequence[object]) -> None:
    now = dispatch_modes()
    shared = len(now) - len(_of_programs(now))
    _set_stack(
        now[shared:], modes[shared:], lambda: _C._pop_torch_dispatch_stack(None), _C._push_on_torch_dispatch_stack
    )


def _set_default_device(device: torch.device | None) -> None:
    default_device.CURRENT_DEVICE = device


def _own_dispatch_modes() -> Sequence[object]:
    modes = dispatch_modes()
    return modes[: len(modes) - len(_of_programs(modes))]


def _set_fill(fill: bool) -> None:
    _deterministic.fill_uninitialized_memory = fill


def _saved_tensors_hooks() -> object:
    hooks = _C._autograd._top_saved_tensors_default_hooks(True)
    return _C._autograd._saved_tensors_hooks_get_disabled_error_message(), hooks


def _disable_saved_tensors_hooks(state: tuple[str | None, object]) -> None:
    message = state[0]
    if message is None:
        _C._autograd._saved_tensors_hooks_enable()
    else:
        _C._autograd._saved_tensors_hooks_disable(message)


def functionalization() -> bool | None:
    """None where it is off, else whether views stay views in it."""
    on = _C._dispatch_tls_is_dispatch_key_included("Functionalize")
    return bool(_C._functionalization_reapply_views_tls()) if on else None


def set_functionalization(views: bool | None) -> None:
    """Functionalization of this thread: off for None, else on, `views` saying whether views are taken again."""
    torch._disable_functionalization()
    if views is not None:
        torch._enable_functionalization(reapply_views=views)


def _bit(name: str) -> int:
    bits: int = _C.DispatchKeySet(getattr(_C.DispatchKey, name)).raw_repr()
    return bits if bits.bit_count() == 1 else 0  # else of one device: the thread has keys for all of them


# Those that calls go by in every thread, and what modes, transforms and functionalization add.
_KNOWN_KEYS = (
    "BackendSelect", "ADInplaceOrView", "Python", "PythonTLSSnapshot", "Functionalize",
    "FuncTorchDynamicLayerFrontMode", "FuncTorchDynamicLayerBackMode",
)  # fmt: skip
_NO_KEYS = ("Autocast", "StartOf", "EndOf")  # other states stand for the first, the others are bounds
_KEYS = {name: bit for name in _C.DispatchKey.__members__ if (bit := _bit(name)) and not name.startswith(_NO_KEYS)}
_TAKEN = functools.reduce(operator.or_, _KEYS.values())
_ADDED = functools.reduce(operator.or_, (bit for name, bit in _KEYS.items() if name not in _KNOWN_KEYS))
_AUTOGRAD = _KEYS["AutogradFunctionality"] | _KEYS["AutogradOther"] | _KEYS["AutogradNestedTensor"]


def _names(bits: int) -> frozenset[str]:
    return frozenset(name for name, bit in _KEYS.items() if bits & bit) if bits else frozenset()


def _dispatch_keys() -> tuple[frozenset[str], frozenset[str]]:
    """What the thread adds to the dispatch keys of each call and what it takes from them, but for what other states of
    the table say. An operator that is implemented in Python runs without the keys of all that came ahead of it."""
    taken = _TAKEN & ~_AUTOGRAD if torch.is_inference_mode_enabled() else _TAKEN
    included, excluded = _C._dispatch_tls_local_include_set(), _C._dispatch_tls_local_exclude_set()
    return _names(included.raw_repr() & _ADDED), _names(excluded.raw_repr() & taken)


def _set_dispatch_keys(wanted: tuple[frozenset[str], frozenset[str]]) -> None:
    setters = (_C._dispatch_tls_set_dispatch_key_included, _C._dispatch_tls_set_dispatch_key_excluded)
    for now, then, turn in zip(_dispatch_keys(), wanted, setters, strict=True):
        for name in now ^ then:
            turn(name, name in then)


AMBIENT: tuple[Ambient, ...] = (
    # how autograd records
    Ambient("grad mode", torch.is_grad_enabled, _C._set_grad_enabled),
    Ambient("inference mode", torch.is_inference_mode_enabled),
    Ambient("forward-mode derivatives", _C._is_fwd_grad_enabled, _C._set_fwd_grad_enabled),
    Ambient("forward-mode level", lambda: forward_ad._current_level),
    Ambient("function transforms", _C._are_functorch_transforms_active),
    Ambient("saved-tensors hooks", _saved_tensors_hooks, _disable_saved_tensors_hooks),
    Ambient(
        "anomaly mode",
        lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        lambda state: torch.set_anomaly_enabled(*state),
        shared=True,
    ),
    Ambient("multithreading", _C._is_multithreading_enabled, _C._set_multithreading_enabled),
    Ambient("view replay", _C._is_view_replay_enabled, _C._set_view_replay_enabled),
    # what an operator's name stands for
    Ambient("function modes", function_modes, _set_function_modes, _same_objects),
    Ambient("dispatch modes", dispatch_modes, _set_dispatch_modes, _same_objects),
    *_switch("torch functions", "_get_torch_function_state", "_set_torch_function_state", shared=False),
    Ambient("default device", lambda: default_device.CURRENT_DEVICE, _set_default_device),
    Ambient("default dtype", torch.get_default_dtype, torch.set_default_dtype, shared=True),
    Ambient("autocast", autocast_state, set_autocast_state),
    Ambient("autocast cache", torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
    Ambient("autocast nesting", _autocast_nesting, _set_autocast_nesting),
    Ambient("functionalization", functionalization, set_functionalization),
    Ambient("dispatch keys", _dispatch_keys, _set_dispatch_keys),
    # which kernel an operator takes
    Ambient(
        "deterministic algorithms",
        lambda: (_C._get_deterministic_algorithms(), _C._get_deterministic_algorithms_warn_only()),
        lambda state: _C._set_deterministic_algorithms(state[0], warn_only=state[1]),
        shared=True,
    ),
    Ambient("fill uninitialized memory", lambda: _deterministic.fill_uninitialized_memory, _set_fill),
    *_switch("matmul precision", "_get_float32_matmul_precision", "_set_float32_matmul_precision"),
    *_switch("TF32 in cuBLAS", "_get_cublas_allow_tf32", "_set_cublas_allow_tf32"),
    *_switch("TF32 in cuDNN", "_get_cudnn_allow_tf32", "_set_cudnn_allow_tf32"),
    *_switch("TF32 in oneDNN", "_get_onednn_allow_tf32", "_set_onednn_allow_tf32"),
    *_switch("float16 accumulation", "_get_cublas_allow_fp16_accumulation", "_set_cublas_allow_fp16_accumulation"),
    *_switch(
        "float16 reductions on the CPU",
        "_get_cpu_allow_fp16_reduced_precision_reduction",
        "_set_cpu_allow_fp16_reduced_precision_reduction",
    ),
    Ambient("cuDNN", _cudnn.read, _cudnn.write, shared=True),
    *_switch("cuDNN benchmark", "_get_cudnn_benchmark", "_set_cudnn_benchmark"),
    *_switch("cuDNN deterministic", "_get_cudnn_deterministic", "_set_cudnn_deterministic"),
    *_switch("MIOpen immediate", "_get_miopen_immediate", "_set_miopen_immediate"),
    Ambient("oneDNN", _onednn.read, _onednn.write, shared=True),
    *_switch("oneDNN deterministic", "_get_mkldnn_deterministic", "_set_mkldnn_deterministic"),
    *_switch("NNPACK", "_get_nnpack_enabled", "_set_nnpack_enabled"),
    *_switch("quantized engine", "_get_qengine", "_set_qengine"),
    *_switch("preferred linear algebra", "_get_linalg_preferred_backend", "_set_linalg_preferred_backend"),
    *_switch("flash attention", "_get_flash_sdp_enabled", "_set_sdp_use_flash"),
    *_switch("memory-efficient attention", "_get_mem_efficient_sdp_enabled", "_set_sdp_use_mem_efficient"),
    *_switch("math attention", "_get_math_sdp_enabled", "_set_sdp_use_math"),
    *_switch("cuDNN attention", "_get_cudnn_sdp_enabled", "_set_sdp_use_cudnn"),
    *_switch("overrideable attention", "_get_overrideable_sdp_enabled", "_set_sdp_use_overrideable"),
    *_switch("order of attentions", "_get_sdp_priority_order", "_set_sdp_priority_order"),
    *_switch(
        "reduced precision in math attention",
        "_get_math_sdp_allow_fp16_bf16_reduction",
        "_set_math_sdp_allow_fp16_bf16_reduction",
    ),
    *_switch("checks of sparse tensors", "_check_sparse_tensor_invariants", "_set_check_sparse_tensor_invariants"),
    # the process
    Ambient("threads", torch.get_num_threads, torch.set_num_threads),
    *_switch("warnings always", "_get_warnAlways", "_set_warnAlways"),
)
# Which kernels attention may take: what a block of a program chooses for the calls in it (`sdpa_kernel`).
ATTENTION: tuple[Ambient, ...] = tuple(
    state
    for state in AMBIENT
    if state.name.endswith((" attention", " attentions")) and not state.name.startswith("reduced precision")
)


def snapshot() -> tuple[object, ...]:
    """The values of `AMBIENT` now, in its order."""
    return tuple(state.read() for state in AMBIENT)


def changed(before: Sequence[object]) -> dict[str, tuple[object, object]]:
    """What differs from a snapshot: name -> (value then, value now)."""
    pairs = ((state, then, state.read()) for state, then in zip(AMBIENT, before, strict=True))
    return {state.name: (then, now) for state, then, now in pairs if not state.same(then, now)}


def restore(before: Sequence[object]) -> None:
    """Writes back what differs from a snapshot, and nothing else."""
    for state, then in zip(AMBIENT, before, strict=True):
        if state.write is not None and not state.same(then, state.read()):
            state.write(then)


class _Noted(threading.local):
    """What this thread has set within `preserved()`, of the states that it shares with others."""

    def __init__(self) -> None:
        self.values: dict[str, object] = {}


_noted = _Noted()


def note(states: Iterable[Ambient]) -> None:
    """This thread has just set these."""
    _noted.values.update((state.name, state.read()) for state in states if state.shared)


@contextmanager
def noting() -> Iterator[None]:
    """A block of code that may set anything; what changes in it counts as set by this thread."""
    before = snapshot()
    try:
        yield
    finally:
        pairs = zip(AMBIENT, before, strict=True)
        note(state for state, then in pairs if state.shared and not state.same(then, state.read()))


class preserved:
    """A block behind which the ambient state is what it was before, however it ends; a state of the process that
    another thread has set meanwhile is what that thread has set."""

    def __init__(self) -> None:
        self._block = preserving()

    def __enter__(self) -> None:
        try:
            next(self._block)
        except BaseException:  # of a signal's handler: it would be ended when that error is freed, and write then
            self._block.close()
            raise

    def __exit__(self, *_: object) -> None:
        self._block.close()


def preserving() -> Generator[None, None, None]:
    """What `preserved` goes through: up to its body, and behind it."""
    before = snapshot()
    outside, _noted.values = _noted.values, {}
    try:
        yield
    finally:
        mine = _noted.values
        try:
            _write_back(before, mine)
        except BaseException:  # of a signal's handler: a second run writes what the first has not come to
            _write_back(before, mine)
            raise
        finally:
            _noted.values = outside


def _write_back(before: Sequence[object], mine: dict[str, object]) -> None:
    for state, then in zip(AMBIENT, before, strict=True):
        now = state.read()
        others = state.shared and (state.name not in mine or not state.same(mine[state.name], now))
        if state.write is not None and not others and not state.same(then, now):
            state.write(then)


# What a compiler finds where nothing is set: each by its name in `AMBIENT`, with what gives the value.
_UNSET: dict[str, Callable[[], object]] = {
    "anomaly mode": lambda: (False, True),
    "function modes": tuple,
    "dispatch modes": _own_dispatch_modes,
    "torch functions": lambda: _C._TorchFunctionState.ENABLED,
    "functionalization": lambda: None,
    "dispatch keys": lambda: (frozenset(), frozenset()),
    "default device": lambda: None,
    "autocast": lambda: tuple((device, False, dtype) for device, _, dtype in autocast_state()),
}


@contextmanager
def unset(default_dtype: torch.dtype) -> Iterator[None]:
    """A block for a compiler that is called in the middle of a program: the program's modes see nothing of what it
    runs, and its defaults mean nothing there, but for the `default_dtype` of what is compiled."""
    values = _UNSET | {"default dtype": lambda: default_dtype}
    with preserved():
        for state in AMBIENT:
            if state.name in values and state.write is not None and not state.same(state.read(), values[state.name]()):
                state.write(values[state.name]())
                note([state])
        yield


# What a trace reads, beside the default dtype: it decides which operators a program is made of.
_TRACED = tuple(
    state
    for state in AMBIENT
    if state in ATTENTION or state.name in ("grad mode", "autocast", "autocast cache", "deterministic algorithms")
)


def as_now() -> Callable[[], AbstractContextManager[None]]:
    """Blocks in which what a trace reads is what it is now: for a program that is traced later, in whatever thread."""
    default_dtype, then = torch.get_default_dtype(), tuple(state.read() for state in _TRACED)

    @contextmanager
    def block() -> Iterator[None]:
        with unset(default_dtype):
            for state, value in zip(_TRACED, then, strict=True):
                if state.write is not None and not state.same(state.read(), value):
                    state.write(value)
                    note([state])
            yield

    return block


_SETTLED: set[str] = set()  # what this process has decided


def settle() -> None:
    """Has torch decide now what it would decide at its first use: the order in which attention takes kernels on a GPU,
    which the first attention sets for the process. What is read before and compared later is then the same."""
    if "attention" in _SETTLED or not torch.cuda.is_initialized() or torch.cuda.is_current_stream_capturing():
        return
    _SETTLED.add("attention")
    _choose_attention(torch.device("cuda"))


def _choose_attention(device: torch.device) -> None:
    with unset(torch.get_default_dtype()), torch.no_grad(), suppress(RuntimeError):
        query = torch.empty(1, 1, 16, 64, dtype=torch.bfloat16, device=device)
        torch._fused_sdp_choice(query, query, query)
