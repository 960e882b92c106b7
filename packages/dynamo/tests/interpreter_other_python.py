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


def main() -> int:
    failures = [f"{name}: no handler" for name, state in report().items() if state == "MISSING"]
    for fn in interpreter_corpus.PROGRAMS:
        expected, got = fn(), Interpreter(PlainWorld()).run(fn)
        if got != expected:
            failures.append(f"{fn.__name__}: native {expected}, interpreted {got}")
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
