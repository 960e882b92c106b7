"""C functions and classes that call back into Python, in a form that calls back through the world.

What is not in the table is a leaf: it runs natively.
"""

from __future__ import annotations

from torchdynamo.interpreter import (
    builtins_attributes,
    builtins_containers,
    builtins_conversions,
    builtins_frames,
    builtins_iteration,
    builtins_operators,
    builtins_types,
)
from torchdynamo.interpreter.builtin_rules import Rules

BUILTINS: Rules = Rules(
    builtins_iteration.RULES
    | builtins_attributes.RULES
    | builtins_types.RULES
    | builtins_conversions.RULES
    | builtins_containers.RULES
    | builtins_operators.RULES
    | builtins_frames.RULES
)
