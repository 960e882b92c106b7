"""`python -m torchdynamo.interpreter.coverage`: each instruction of this Python is handled, or listed with a reason."""

from __future__ import annotations

import dis
import sys

from torchdynamo.interpreter.frame import HANDLERS, UNSUPPORTED

# Not executed: filled in by the running interpreter, or gone after assembly.
_NOT_COMPILED = {
    "CACHE": "an inline cache",
    "ENTER_EXECUTOR": "made by the optimiser while running",
    "EXIT_INIT_CHECK": "made by specialisation while running",
    "EXTENDED_ARG": "folded into the next instruction",
    "INTERPRETER_EXIT": "ends a frame entered from C",
    "RESERVED": "not an instruction",
}
_FIRST_PSEUDO = 256


def report() -> dict[str, str]:
    """For each instruction: "handled", "unsupported: why", "not compiled: why", or "MISSING"."""
    lines = {}
    for name, op in sorted(dis.opmap.items()):
        if op in HANDLERS:
            lines[name] = "handled"
        elif name in UNSUPPORTED:
            lines[name] = f"unsupported: {UNSUPPORTED[name]}"
        elif name in _NOT_COMPILED:
            lines[name] = f"not compiled: {_NOT_COMPILED[name]}"
        elif op >= _FIRST_PSEUDO:
            lines[name] = "not compiled: a pseudo instruction of the compiler"
        elif name.startswith("INSTRUMENTED_"):
            lines[name] = "not compiled: a traced copy, read as the original"
        else:
            lines[name] = "MISSING"
    return lines


def main() -> int:
    """Prints what becomes of each instruction of this Python; 1 where one has neither handler nor reason."""
    lines = report()
    for name, state in lines.items():
        print(f"{name:36} {state}")
    missing = [name for name, state in lines.items() if state == "MISSING"]
    print(f"Python {sys.version.split()[0]}: {len(lines)} instructions, {len(missing)} without handler or reason")
    return bool(missing)


if __name__ == "__main__":
    raise SystemExit(main())
