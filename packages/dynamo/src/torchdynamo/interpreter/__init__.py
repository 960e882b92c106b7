"""A bytecode interpreter for CPython 3.11, 3.12 and 3.13 that runs programs on real objects.

`World` (see `protocol.py`) decides what happens when the program touches something; `PlainWorld` does what
CPython does. The package imports nothing outside of the standard library.
"""

from torchdynamo.interpreter.calls import Interpreter
from torchdynamo.interpreter.frame import InterpretedFrame
from torchdynamo.interpreter.generators import InterpretedGenerator
from torchdynamo.interpreter.plain_world import PlainWorld
from torchdynamo.interpreter.protocol import MISSING, NULL, Escape, Position, UnsupportedProgram, World

__all__ = [
    "MISSING", "NULL", "Escape", "InterpretedFrame", "InterpretedGenerator", "Interpreter", "PlainWorld", "Position",
    "UnsupportedProgram", "World",
]  # fmt: skip
