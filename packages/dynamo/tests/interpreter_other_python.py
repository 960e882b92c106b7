"""Run by any supported Python, without torch or pytest: the corpus and random programs, natively and interpreted.

python3.13 packages/dynamo/tests/interpreter_other_python.py
"""

import pathlib
import random
import sys
import types

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE))
# The package's own __init__ needs torch; the interpreter does not.
package = types.ModuleType("torchdynamo")
package.__path__ = [str(HERE.parent / "src" / "torchdynamo")]
sys.modules["torchdynamo"] = package

import interpreter_corpus  # noqa: E402, I001
import interpreter_random_programs  # noqa: E402
from torchdynamo.interpreter import Interpreter, PlainWorld  # noqa: E402
from torchdynamo.interpreter.coverage import report  # noqa: E402


CONDITIONS = {
    "a comparison": "if a > b: raise ValueError",
    "a comparison's contrary": "if not a < b: raise ValueError",
    "a value": "if b - b: raise ValueError",
    "a value's contrary": "if not b: raise ValueError",
    "an assertion": "assert a < b",
    "an assertion with a text": "assert b, f'{a}'",
    "two": "assert a < b and b",
    "another branch": "if a < b: pass\n    else: raise ValueError",
}
"""Statements that end in a `raise` or go on."""


class Asked(PlainWorld):
    """Counts the values whose truth decides about a `raise`, and those whose truth is asked otherwise."""

    def __init__(self):
        super().__init__()
        self.checked = self.asked = 0

    def check(self, obj, expected):
        self.checked += 1
        assert bool(obj) is expected
        return expected

    def truth(self, obj):
        self.asked += 1
        return super().truth(obj)


class Number:
    """Compares as tensors do: the answer is no bool."""

    def __init__(self, value):
        self.value = value

    def __bool__(self):
        return bool(self.value)

    def __lt__(self, other):
        return Number(self.value < other.value)

    def __gt__(self, other):
        return Number(self.value > other.value)

    def __sub__(self, other):
        return Number(self.value - other.value)


def overlooked(statement):
    """Whether a condition ahead of a `raise` is taken for another one."""
    namespace = {}
    exec(f"def program(a, b):\n    {statement}\n    return a - b", namespace)
    world = Asked()
    result = Interpreter(world).run(namespace["program"], Number(1), Number(2))
    return result.value != -1 or not world.checked or world.asked


def main() -> int:
    failures = [f"{name}: no handler" for name, state in report().items() if state == "MISSING"]
    for fn in interpreter_corpus.PROGRAMS:
        expected, got = fn(), Interpreter(PlainWorld()).run(fn)
        if got != expected:
            failures.append(f"{fn.__name__}: native {expected}, interpreted {got}")
    failures += [f"{name}: not seen to decide about a raise" for name, one in CONDITIONS.items() if overlooked(one)]
    first = random.randrange(2**40)
    for seed in range(first, first + 1000):
        try:
            interpreter_random_programs.check(seed)
        except AssertionError as error:
            failures.append(str(error))
    print("\n".join(failures))
    print(f"Python {sys.version.split()[0]}: {len(interpreter_corpus.PROGRAMS)} programs, {len(failures)} failures")
    return bool(failures)


if __name__ == "__main__":
    raise SystemExit(main())
