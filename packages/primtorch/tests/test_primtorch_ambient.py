"""What a block does to the ambient state is undone behind it; the table of it knows what torch can set."""

from __future__ import annotations

import gc
import re
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from primtorch import ambient, withheld
from primtorch.functionalize import functional_region, outside_functionalization
from primtorch.withheld import Withheld


class Passing(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Dispatching(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


# What each state is set to besides what it is in a fresh process; the others are switches, which are turned.
OTHERS: dict[str, Any] = {
    "saved-tensors hooks": ("a test", None),
    "anomaly mode": (True, False),
    "function modes": (Passing(),),
    "dispatch modes": (Dispatching(),),
    "default device": torch.device("meta"),
    "default dtype": torch.float64,
    "autocast": tuple((device, True, torch.float32) for device, _, _ in ambient.autocast_state()),
    "autocast nesting": 2,
    "deterministic algorithms": (True, True),
    "matmul precision": "high",
    "quantized engine": 0,
    "preferred linear algebra": torch._C._LinalgBackend.Cusolver,
    "order of attentions": [2, 1, 0, 3, 4],
    "dispatch keys": (frozenset(), frozenset({"AutogradFunctionality", "Functionalize"})),
    "threads": 3,
    "TF32 in oneDNN": True,
}


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    before = ambient.snapshot()
    yield
    ambient.restore(before)
    assert not ambient.changed(before)


@pytest.mark.parametrize("state", [s for s in ambient.AMBIENT if s.write], ids=lambda s: s.name)
@pytest.mark.parametrize("fails", [False, True], ids=["ends", "raises"])
def test_each_state_is_restored(state: ambient.Ambient, fails: bool) -> None:
    assert state.write is not None
    before = ambient.snapshot()
    now = state.read()
    other = OTHERS[state.name] if state.name in OTHERS else not now
    if state.name == "torch functions":
        other = torch._C._TorchFunctionState.SUBCLASSES_DISABLED
    with ExitStack() as stack:
        if fails:
            stack.enter_context(pytest.raises(ZeroDivisionError))
        stack.enter_context(ambient.preserved())
        try:
            state.write(other)
        except RuntimeError as refused:
            pytest.skip(f"this build of torch: {refused}")
        if state.read() == now:
            pytest.skip("this build of torch takes no other value")
        ambient.note([state])
        assert state.name in ambient.changed(before)
        if fails:
            raise ZeroDivisionError
    assert not ambient.changed(before)


class Struck(Exception):
    pass


def _struck_at(number: int, run: Callable[[], object]) -> bool:
    """Runs, and raises in it where the interpreter would call a signal's handler for the nth time: as functions start,
    and as calls of C come back. Says whether it came so far."""
    left = number

    def strike(frame: object, event: str, argument: object) -> None:
        nonlocal left
        if event in ("call", "c_return"):
            left -= 1
            if not left:
                sys.setprofile(None)
                raise Struck

    try:
        sys.setprofile(strike)
        run()
    except Struck:
        return True
    finally:
        sys.setprofile(None)
    return False


@pytest.mark.parametrize("state", ambient.AMBIENT, ids=lambda s: s.name)
def test_a_state_that_is_being_read_is_left_as_it_was(state: ambient.Ambient) -> None:
    before, number = ambient.snapshot(), 1
    while _struck_at(number, state.read):
        assert not ambient.changed(before), f"the handler of a signal raised at call {number}"
        number += 1


@pytest.mark.parametrize("state", [s for s in ambient.AMBIENT if s.write], ids=lambda s: s.name)
def test_each_state_is_restored_where_a_signal_interrupts_it(state: ambient.Ambient) -> None:
    assert state.write is not None
    before, other = ambient.snapshot(), _other_value(state)
    if state.name == "torch functions":
        other = torch._C._TorchFunctionState.SUBCLASSES_DISABLED

    def leave() -> bool:
        """Sets the state in a block, and leaves the block."""
        block = ambient.preserving()
        next(block)
        try:
            state.write(other)  # type: ignore[misc]
        except RuntimeError as refused:
            pytest.skip(f"this build of torch: {refused}")
        ambient.note([state])
        return _struck_at(number, lambda: next(block, None))

    number = 1
    while leave():
        number += 1
        assert not ambient.changed(before), f"the handler of a signal raised at call {number}"


def test_a_block_that_a_signal_interrupts_before_its_body_writes_nothing_later() -> None:
    """The error keeps what it went through alive; what was read for the block is old when the error is freed."""
    before, entered, number = ambient.snapshot(), False, 0

    def enter() -> None:
        nonlocal entered
        with torch._C.DisableTorchFunctionSubclass(), ambient.preserved():
            entered = True
            sys.setprofile(None)

    while not entered:
        number += 1
        _struck_at(number, enter)
        assert not ambient.changed(before), f"the handler of a signal raised at call {number}"
    assert number > 10


def _other_value(state: ambient.Ambient) -> Any:
    return OTHERS[state.name] if state.name in OTHERS else not state.read()


def _in_a_thread(work: Callable[[], None]) -> None:
    raised: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(60)
    assert not thread.is_alive(), "the other thread did not come to its end"
    if raised:
        raise raised[0]


@pytest.mark.parametrize("noted", [False, True], ids=["", "set here first"])
@pytest.mark.parametrize("state", [s for s in ambient.AMBIENT if s.shared], ids=lambda s: s.name)
def test_what_another_thread_sets_meanwhile_stays(state: ambient.Ambient, noted: bool) -> None:
    assert state.write is not None
    first, other = state.read(), _other_value(state)
    with ambient.preserved():
        try:
            if noted:
                state.write(other)
                ambient.note([state])
            _in_a_thread(lambda: state.write(first if noted else other))  # type: ignore[misc]
        except RuntimeError as refused:
            pytest.skip(f"this build of torch: {refused}")
        left = state.read()
        if not noted and left == first:
            pytest.skip("this build of torch takes no other value, or each thread has its own")
    assert state.same(state.read(), left)


def test_modes_of_the_program_stay_those_that_they_were() -> None:
    outer, inner = Passing(), Passing()
    with outer, torch.device("meta"):
        modes = ambient.function_modes()
        with ambient.preserved():
            inner.__enter__()
            torch._C._pop_torch_function_stack()
            torch._C._pop_torch_function_stack()
        assert all(a is b for a, b in zip(ambient.function_modes(), modes, strict=True)) and len(modes) == 2
        assert torch.ones(2).device.type == "meta"
    assert torch.ones(2).device.type == "cpu"


@pytest.mark.parametrize("fails", [False, True], ids=["ends", "raises"])
@pytest.mark.parametrize("block", [functional_region, outside_functionalization])
@pytest.mark.parametrize("taken", [False, True], ids=["", "taken"])
@pytest.mark.parametrize("views", [None, False, True], ids=["off", "copies", "views"])
def test_functionalization_is_left_as_it_was_found(views: bool | None, taken: bool, block: Any, fails: bool) -> None:
    """Also by a block within the other: a trace asks eager for an error, which may trace in its turn."""
    ambient.set_functionalization(views)
    torch._C._dispatch_tls_set_dispatch_key_excluded("Functionalize", taken)
    before = ambient.snapshot()
    with ExitStack() as stack:
        if fails:
            stack.enter_context(pytest.raises(ZeroDivisionError))
        for each in (block, outside_functionalization, functional_region, block):
            stack.enter_context(each())
            assert ambient.functionalization() is (None if each is outside_functionalization else True)
            assert not torch._C._dispatch_tls_is_dispatch_key_excluded("Functionalize")
        if fails:
            raise ZeroDivisionError
    assert not ambient.changed(before)


# Functions of torch._C that set something else than what an operator, autograd or torch's Python code reads.
NO_STATE = {
    "_set_conj", "_set_neg",  # of a tensor
    "_set_generator_metaclass", "_set_obj_in_tls", "_set_thread_name", "_set_worker_pids",
    "_set_worker_signal_handlers", "_set_print_stack_traces_on_fatal_signal", "_set_throw_on_mutable_data_ptr",
    "_set_warn_deprecated_on_mutable_data_ptr", "_set_tensor_metadata", "_set_override_stale_capture_stream",
    "_set_should_use_format_with_string_table", "_set_default_mobile_cpu_allocator", "_set_value_trace",
    "_set_graph_exec_group", "_set_graph_executor_optimize", "_set_num_profiled_runs", "_set_tracing_state",
    "_set_cached_tensors_enabled", "_set_only_lift_cpu_tensors", "_set_meta_in_tls_dispatch_include",
    "_set_skip_next_torch_function", "_set_autograd_fallback_mode", "_set_backcompat_broadcast_warn",
    "_set_backcompat_keepdim_warn", "_set_sm_carveout_experimental",
    "_set_dtensor_allow_implicit_replication", "_set_grad_layout_enforcement_enabled",
    "_set_warn_on_accumulate_grad_stream_mismatch", "set_flush_denormal", "set_num_interop_threads",
    "_set_rocm_fa_preferred_backend", "_set_storage_access_error_msg",
    "_set_storage_data_ptr_access_error_msg", "set_vital", "_set_cudnn_depthwise_kernel", "_set_sdp_use_fa3",
    "_set_blas_preferred_backend",  # to read it would start the device
    "_set_fp32_precision_setter",  # the same as the switches of TF32, by another name
    "_set_default_tensor_type",  # a dtype and a device
    "_set_dispatch_mode",  # of torch's own machinery
    "_set_deterministic_fill_uninitialized_memory",  # read through its Python module
    "_set_default_dtype",  # read and written by its public names
    "_set_cublas_allow_fp16_reduced_precision_reduction", "_set_cublas_allow_bf16_reduced_precision_reduction",
}  # fmt: skip


def test_the_table_knows_every_setter() -> None:
    """A setter that a new version of torch brings has to be in the table, or here among those that are none."""
    source = open(ambient.__file__).read()
    setters = {name for name in dir(torch._C) if re.match(r"_?set_", name)}
    legacy = {name for name in setters if re.match(r"set_autocast_(cpu|gpu|ipu|xla)_", name)}
    unknown = {name for name in setters - NO_STATE - legacy if not re.search(rf"\b{name}\b", source)}
    assert not unknown


def test_a_switch_held_off_by_two_threads_at_once_is_then_what_the_program_has_set() -> None:
    """Tracers come and go in any order; a snapshot between them, and one that is restored, know nothing of them."""
    is_on = [True]
    switch = Withheld(lambda: is_on[0], lambda on: is_on.__setitem__(0, on))
    with ExitStack() as first, ExitStack() as second:
        first.enter_context(switch.off())
        second.enter_context(switch.off())
        assert switch.read() and not is_on[0]
        first.close()
        assert switch.read() and not is_on[0]
    assert is_on[0]
    with switch.off():
        switch.write(False)
        assert not switch.read()
    assert not is_on[0]
    with switch.off():
        switch.write(True)
        assert not is_on[0]
    assert is_on[0]


def test_what_was_made_while_the_collector_was_off_is_old(monkeypatch: pytest.MonkeyPatch) -> None:
    """No round follows over all of it; garbage among it is collected at last, and what a program froze stays so."""

    def knot() -> list[Any]:
        made: list[Any] = []
        made.append(made)
        return made

    collector = withheld.Withheld(gc.isenabled, withheld._Collector().set)  # that has seen nothing
    with collector.off():
        made = knot()
    assert any(found is made for found in gc.get_objects(generation=2))
    monkeypatch.setattr(withheld, "MOST_UNSEEN", 5_000)
    gc.collect()

    class Dropped:
        pass

    alive = []
    for _ in range(30):  # each round over all objects takes long in a process that has run many tests
        with collector.off():
            dropped = [Dropped() for _ in range(500)]
            dropped[0].rest = dropped  # type: ignore[attr-defined]
            alive.append(weakref.ref(dropped[0]))
            del dropped
    assert sum(found() is not None for found in alive) <= 20
    gc.freeze()
    try:
        frozen = gc.get_freeze_count()
        with collector.off():
            knot()
        assert gc.get_freeze_count() > frozen // 2
    finally:
        gc.unfreeze()


def test_what_a_program_has_frozen_is_counted_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python counts it object by object."""
    asked: list[int] = []
    monkeypatch.setattr(gc, "get_freeze_count", lambda: asked.append(len(asked)) or 1)
    collector = withheld.Withheld(gc.isenabled, withheld._Collector().set)
    for _ in range(2 * withheld.ASKED_AGAIN):
        with collector.off():
            pass
    assert len(asked) == 2 and gc.isenabled()


def test_an_interrupt_while_the_state_is_written_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control-C arrives anywhere: here each time that a state is read at the end of a block, once."""
    before = ambient.snapshot()
    for place in range(len(ambient.AMBIENT)):
        state, interrupts = ambient.AMBIENT[place], [KeyboardInterrupt()]

        def read(state: ambient.Ambient = state, interrupts: list[KeyboardInterrupt] = interrupts) -> Any:
            if ended and interrupts:
                raise interrupts.pop()
            return state.read()

        ended = False
        states = list(ambient.AMBIENT)
        states[place] = replace(state, read=read)
        monkeypatch.setattr(ambient, "AMBIENT", tuple(states))
        with pytest.raises(KeyboardInterrupt), ambient.preserved():
            torch.set_grad_enabled(False)
            torch.set_autocast_enabled("cpu", True)
            ended = True
        monkeypatch.undo()
        assert not ambient.changed(before), state.name
