"""The tables: functions of NumPy and methods of its arrays, each with its rule."""

from __future__ import annotations

try:
    import numpy
except ImportError:
    numpy = None  # type: ignore[assignment]

from torchdynamo.arrays.linear_algebra import DOT, LINALG, PRODUCTS
from torchdynamo.arrays.reductions import REDUCING, REDUCTIONS
from torchdynamo.arrays.rules import Rule
from torchdynamo.arrays.shapes import CAST, SHAPE_METHODS, SHAPES, SHAPING
from torchdynamo.arrays.spectra import CONJUGATES, SIGNALS, SPECTRA
from torchdynamo.arrays.values import TORCH_DTYPES

METHODS: dict[str, Rule] = REDUCTIONS | SHAPES | SHAPE_METHODS | DOT | CONJUGATES
_NAMED: dict[str, Rule] = REDUCTIONS | REDUCING | SHAPES | SHAPING | DOT | PRODUCTS | SIGNALS


def _functions() -> dict[object, Rule]:
    if numpy is None:
        return {}
    found = {getattr(numpy, name): rule for name, rule in _NAMED.items() if hasattr(numpy, name)}
    aliases = {"amax": "max", "amin": "min", "concat": "concatenate", "around": "round"}
    found |= {getattr(numpy, name): _NAMED[of] for name, of in aliases.items() if hasattr(numpy, name)}
    found |= {dtype.type: CAST for dtype in TORCH_DTYPES}
    found |= {getattr(numpy.fft, name): rule for name, rule in SPECTRA.items()}
    return found | {getattr(numpy.linalg, name): rule for name, rule in LINALG.items()}


FUNCTIONS: dict[object, Rule] = _functions()
