"""Resume functions: their code, what they refuse, and the programs of `resume_programs.py` on every interpreter here."""

from __future__ import annotations

import dis
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from torchdynamo.after_break.liveness import live_slots
from torchdynamo.after_break.resume import Entrance, make_resume
from torchdynamo.interpreter.decode import decode

HERE = Path(__file__).parent


def test_break_at_every_instruction(installed_python: str) -> None:
    script = str(HERE / "resume_programs.py")
    done = subprocess.run([installed_python, script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-4000:]
    assert int(done.stdout) > 500


def loops(n: int) -> int:
    return sum(range(n))


def test_names_and_refusals() -> None:
    resumed = make_resume(loops, Entrance(0, (), ("n",)))
    assert (resumed.__name__, resumed.__code__.co_name, resumed.__code__.co_filename) == ("loops", "loops", __file__)

    def generator() -> Any:
        yield 1

    with pytest.raises(ValueError, match="suspends"):
        make_resume(generator, Entrance(0))
    with pytest.raises(ValueError, match="starts at byte"):
        make_resume(loops, Entrance(1))
    with pytest.raises(ValueError, match="not a variable"):
        make_resume(loops, Entrance(0, (), ("absent",)))


def test_long_code_needs_extended_arguments() -> None:
    names = [f"v{i}" for i in range(300)]
    source = "def f(a):\n" + "".join(f"    {n} = a + {i}\n" for i, n in enumerate(names))
    source += f"    return sum([{', '.join(names)}])\n"
    scope: dict[str, Any] = {}
    exec(source, scope)
    function = scope["f"]
    total = next(i.offset for i in dis.get_instructions(function) if i.opname == "LOAD_GLOBAL")
    resumed = make_resume(function, Entrance(total, (), tuple(names)))
    assert resumed(list(range(300))) == sum(range(300))


def looks_there(x: int, y: int) -> object:
    names = sorted(locals().items())
    z = x + len(names)
    return z


def looks_twice(x: int, y: int) -> object:
    names = sorted(locals().items())
    z = x + len(names)
    return sorted(vars()), z


def looks_later(x: int, y: int) -> object:
    look = locals
    z = x + 1
    return look(), z


def looks_at_another(x: int, y: int) -> object:
    names = vars(test_break_at_every_instruction)
    z = x + len(names)
    return z


def of_a_name(x: Any, y: int) -> object:
    z = x + 1
    return x.locals(), z


LOOKS = {looks_there: "", looks_twice: "xy", looks_later: "xy", looks_at_another: "xy", of_a_name: "xy"}


@pytest.mark.parametrize("function", LOOKS, ids=lambda function: function.__name__)
def test_what_is_carried_where_a_function_looks_at_its_variables(function: Callable[..., object]) -> None:
    """`locals()` looks at all variables where it is called. What may be called elsewhere looks at them everywhere."""
    code = function.__code__
    decoded = decode(code, {}, lambda op: lambda frame, operand: None)
    live = {}
    for instruction in dis.get_instructions(code):
        found = live_slots(decoded, decoded.index_of[instruction.offset], code.co_names)
        live[instruction.opname] = {name for name in "xy" if decoded.local_names.index(name) in found}
    assert live["BINARY_OP"] == set(LOOKS[function])
    assert live["RESUME"] == set("xy")
