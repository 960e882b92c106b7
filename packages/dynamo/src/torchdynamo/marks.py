"""Functions that users marked. Held weakly: a mark lives as long as its function."""

from __future__ import annotations

import weakref
from typing import Any

DISABLED: weakref.WeakSet[Any] = weakref.WeakSet()
ALLOWED: weakref.WeakSet[Any] = weakref.WeakSet()
