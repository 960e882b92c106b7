"""Settings of the process and of the thread that a program asks for: each call has those of its own time."""

from __future__ import annotations

import decimal
import gc
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch

import torchcompile

Row = tuple[Callable[[], Any], Callable[[Any], object], tuple[Any, ...]]
BOTH = (False, True, False)


def of(owner: Any, name: str, values: tuple[Any, ...] = BOTH) -> Row:
    """An attribute; torch's own tests let nobody set those of its back ends, in the processes in which they are read."""

    def put(value: Any) -> None:
        with torch.backends.__allow_nonbracketed_mutation():
            setattr(owner, name, value)

    return lambda: getattr(owner, name), put, values


def in_environment(value: str | None) -> None:
    if value is None:
        os.environ.pop("TORCHCOMPILE_TEST_SETTING", None)
    else:
        os.environ["TORCHCOMPILE_TEST_SETTING"] = value


def in_zone(name: str) -> None:
    os.environ["TZ"] = name
    time.tzset()


def with_invariants(on: bool) -> None:
    checks = torch.sparse.check_sparse_tensor_invariants
    checks.enable() if on else checks.disable()


LOGGER = logging.getLogger("torchcompile.test_settings")
cuda, cudnn, mkldnn = torch.backends.cuda, torch.backends.cudnn, torch.backends.mkldnn
SETTINGS: dict[str, Row] = {
    "threads": (torch.get_num_threads, torch.set_num_threads, (1, 2, 1)),
    "default dtype": (torch.get_default_dtype, torch.set_default_dtype, (torch.float32, torch.float64, torch.float32)),
    "precision of products": (
        torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, ("highest", "high", "medium"),
    ),
    "deterministic": (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, BOTH),
    "how deterministic": (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode, (0, 1, 2)),
    "memory that is filled": of(torch.utils.deterministic, "fill_uninitialized_memory", (True, False, True)),
    "warnings each time": (torch.is_warn_always_enabled, torch.set_warn_always, BOTH),
    "grad mode": (torch.is_grad_enabled, torch._C._set_grad_enabled, (True, False, True)),
    "forward mode": (torch._C._is_fwd_grad_enabled, torch._C._set_fwd_grad_enabled, (True, False, True)),
    "anomalies": (torch.is_anomaly_enabled, torch.set_anomaly_enabled, BOTH),
    "threads of backwards": (
        torch._C._is_multithreading_enabled, torch._C._set_multithreading_enabled, (True, False, True),
    ),
    "views that are replayed": (torch._C._is_view_replay_enabled, torch._C._set_view_replay_enabled, BOTH),
    "autocast": (lambda: torch.is_autocast_enabled("cpu"), lambda on: torch.set_autocast_enabled("cpu", on), BOTH),
    "autocast's dtype": (
        lambda: torch.get_autocast_dtype("cpu"), lambda dtype: torch.set_autocast_dtype("cpu", dtype),
        (torch.bfloat16, torch.float16, torch.bfloat16),
    ),
    "autocast's cache": (torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled, (True, False, True)),
    "cudnn's search": of(cudnn, "benchmark"),
    "cudnn": of(cudnn, "enabled", (True, False, True)),
    "mkldnn": of(mkldnn, "enabled", (True, False, True)),
    "tf32": of(cuda.matmul, "allow_tf32"),
    "flash attention": (cuda.flash_sdp_enabled, cuda.enable_flash_sdp, (True, False, True)),
    "plain attention": (cuda.math_sdp_enabled, cuda.enable_math_sdp, (True, False, True)),
    "order of attention": (
        torch._C._get_sdp_priority_order, torch._C._set_sdp_priority_order, ([0, 1, 2, 3, 4], [1, 0, 2, 3, 4]),
    ),
    "sparse invariants": (torch.sparse.check_sparse_tensor_invariants.is_enabled, with_invariants, BOTH),
    "order of contractions": of(torch.backends.opt_einsum, "enabled", (True, False, True)),
    "seed": (torch.initial_seed, torch.manual_seed, (1, 2, 3)),
    "parameters that are overwritten": (
        torch.__future__.get_overwrite_module_params_on_conversion,
        torch.__future__.set_overwrite_module_params_on_conversion, BOTH,
    ),
    "environment": (lambda: os.environ.get("TORCHCOMPILE_TEST_SETTING"), in_environment, ("a", "b", None)),
    "asked of the system": (lambda: os.getenv("TORCHCOMPILE_TEST_SETTING", "none"), in_environment, ("a", "b", None)),
    "folder": (os.getcwd, os.chdir, ("/tmp", "/", "/tmp")),
    "time zone": (lambda: time.tzname[0], in_zone, ("UTC", "EST5EDT", "UTC")),
    "collector": (gc.isenabled, lambda on: gc.enable() if on else gc.disable(), (True, False, True)),
    "collector's rounds": (gc.get_threshold, lambda most: gc.set_threshold(*most), ((700, 10, 10), (500, 10, 10))),
    "depth of calls": (sys.getrecursionlimit, sys.setrecursionlimit, (1500, 2000, 1500)),
    "turns of threads": (sys.getswitchinterval, sys.setswitchinterval, (0.005, 0.01, 0.005)),
    "digits of decimals": (
        lambda: decimal.getcontext().prec, lambda digits: setattr(decimal.getcontext(), "prec", digits), (28, 10, 5),
    ),
    "thread's name": (
        lambda: threading.current_thread().name, lambda name: setattr(threading.current_thread(), "name", name),
        ("one", "two", "one"),
    ),
    "NumPy's errors": (lambda: numpy.geterr()["under"], lambda how: numpy.seterr(under=how), ("ignore", "warn", "ignore")),
    "NumPy's texts": (
        lambda: numpy.get_printoptions()["precision"], lambda digits: numpy.set_printoptions(precision=digits), (8, 4, 8),
    ),
    "logger": (lambda: LOGGER.isEnabledFor(logging.INFO), LOGGER.setLevel, (logging.DEBUG, logging.ERROR, logging.DEBUG)),
    "signals": (
        lambda: signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN,
        lambda on: signal.signal(signal.SIGUSR1, signal.SIG_IGN if on else signal.SIG_DFL), BOTH,
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def as_before(request: pytest.FixtureRequest) -> Iterator[None]:
    """Puts the setting back."""
    what = request.node.callspec.params["what"]
    ask, put, _ = SETTINGS[what]
    before, zone = ask(), os.environ.get("TZ")
    yield
    if what == "time zone":
        os.environ.pop("TZ", None) if zone is None else os.environ.update(TZ=zone)
        time.tzset()
    elif what == "logger":
        LOGGER.setLevel(logging.NOTSET)
    else:
        put(None if put is in_environment else before)


@pytest.mark.expected_eager(...)
@pytest.mark.parametrize("what", SETTINGS)
def test_a_setting_is_that_of_the_call(what: str) -> None:
    ask, put, values = SETTINGS[what]

    def program(x: torch.Tensor) -> Any:
        return x.sin(), ask()

    def run(function: Callable[..., Any]) -> list[Any]:
        answers = []
        for value in values:
            put(value)
            answers.append(function(torch.ones(2, dtype=torch.float64))[1])
        return answers

    expected = run(program)
    assert len(set(map(str, expected))) > 1, "the values say nothing"
    found = run(torchcompile.compile(program))
    assert found == expected
    faults = [str(event) for event in torchcompile.report().events if event.kind.id == "capture_fault"]
    assert not faults, faults
