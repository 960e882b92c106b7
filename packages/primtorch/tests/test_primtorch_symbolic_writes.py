"""Every in-place operator of tensors and numbers takes symbolic sizes when functionalization runs it, in each dtype that
eager takes, and fixes none of them: torch's own programs and derivatives call them where nobody sees it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import torch
from torch._ops import OpOverload

from primtorch.fake import FakeMode
from primtorch.fake.table import is_composite
from primtorch.symbolic import ShapeEnv
from primtorch.symbolic.relation import Relation

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.complex64, torch.int64, torch.bool)
NUMBERS = frozenset({"number", "float", "int"})
OTHER_MEMORY = frozenset({"set_"})


def written() -> Iterator[OpOverload]:
    for name in sorted(dir(torch.ops.aten)):
        packet = getattr(torch.ops.aten, name)
        if not name.endswith("_") or name.startswith("_") or name in OTHER_MEMORY:
            continue
        for overload in packet.overloads():
            op = getattr(packet, overload)
            wanted = [str(a.type) for a in op._schema.arguments if not a.has_default_value()]
            if all(kind == "Tensor" or kind in NUMBERS for kind in wanted) and not is_composite(op):
                yield op


def arguments(op: OpOverload, target: torch.Tensor) -> list[object]:
    wanted = [str(a.type) for a in op._schema.arguments if not a.has_default_value()]
    return [target, *(target.clone() if kind == "Tensor" else 1 for kind in wanted[1:])]


def problem(op: OpOverload, dtype: torch.dtype) -> str:
    env = ShapeEnv()
    mode = FakeMode(env)
    sizes = {0: env.symbol(3, "rows"), 1: env.symbol(4, "columns")}
    fake = mode.from_tensor(torch.ones(3, 4, dtype=dtype), dynamic=sizes)
    torch._enable_functionalization(reapply_views=True)
    try:
        with mode:
            target = torch._to_functional_tensor(fake)
            op(*arguments(op, target))
            torch._sync(target)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        torch._disable_functionalization()
    return ", ".join(str(g.expr) for g in env.guards if isinstance(g.expr, Relation) and g.expr.op == "eq")


def test_operators_that_write() -> None:
    calls, problems = 0, {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for op in written():
            for dtype in DTYPES:
                try:
                    op(*arguments(op, torch.ones(3, 4, dtype=dtype)))
                except Exception:  # eager does not take it
                    continue
                calls += 1
                found = problem(op, dtype)
                if found:
                    problems[f"{op} of {dtype}"] = found
    assert calls > 300
    assert not problems, problems
