"""Faults, planted one at a time into the stages, and a small transformer block that meets each of them.

    python packages/compile/tests/planted_faults.py [--out docs/results/faults.md] [names]

runs `verify` and `minify` on each, and writes the page.
"""

from __future__ import annotations

import argparse
import os
import re
import runpy
import signal
import sys
import tempfile
import textwrap
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx

import torchcompile
import torchdynamo.convert
from torchcompile.faults.children import Death, in_child
from torchcompile.faults.minify import Minified, minify_script
from torchdynamo.graph.recorder import Recorder
from torchdynamo.outside.guard_set import GuardSet
from torchdynamo.schemas import GuardKind
from torchinductor.codegen.cpp.backend import CppBackend

SCRIPT = """
import torch
import torchcompile
from torch import nn

SCALE = 2.0


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.qkv = nn.Linear(16, 48)
        self.out = nn.Linear(16, 16)
        self.up = nn.Linear(16, 32)
        self.down = nn.Linear(32, 16)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        weights = torch.softmax(q @ k.transpose(-2, -1) / 4.0, dim=-1)
        x = x + self.out(weights @ v)
        hidden = nn.functional.gelu(self.up(x))
        gate = torch.sigmoid(hidden) if self.gated else torch.relu(hidden)
        y = x + self.down(hidden * gate)
        return torch.tanh(y * SCALE).amax(dim=1).cumsum(-1)


torch.manual_seed(0)
block = Block()
block.gated = True
compiled = torchcompile.compile(block)
compiled(torch.randn(2, 5, 16)).sum().backward()
block.gated = False
compiled(torch.randn(2, 5, 16)).sum().backward()
SCALE = 3.0
compiled(torch.randn(2, 5, 16)).sum().backward()
"""

aten = torch.ops.aten
Plant = Callable[[pytest.MonkeyPatch], None]


@dataclass(frozen=True)
class Planted:
    """A fault, and what has to be said of it: the stage, and an operator that is named."""

    name: str
    stage: str
    operator: str
    plant: Plant
    raises: bool = False
    dies: str = ""  # by this signal


def _rule(overload: Any, wrong: Callable[..., Any]) -> Plant:
    """Another rule for an operator; `wrong(rules, builder, *args)`."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        module: Any = sys.modules["primtorch.lower"]
        right = module.decompositions

        def decompositions(*args: Any) -> Any:
            rules = dict(right(*args))
            known = dict(rules)
            rules[overload] = lambda b, *given, **named: wrong(known, b, *given, **named)
            return rules

        patch.setattr(module, "decompositions", decompositions)

    return plant


def _half(overload: Any) -> Plant:
    """The rule forgets a factor of two."""

    def wrong(rules: Any, b: Any, *args: Any, **kwargs: Any) -> Any:
        return rules[aten.mul.Scalar](b, rules[overload](b, *args, **kwargs), 0.5)

    return _rule(overload, wrong)


def _raise(*args: Any, **kwargs: Any) -> Any:
    raise NotImplementedError("planted")


def _dies(number: signal.Signals) -> Callable[..., Any]:
    def die(*args: Any, **kwargs: Any) -> Any:
        os.kill(os.getpid(), number)

    return die


def _joint(edit: Callable[[fx.Graph, fx.Node], None], overload: Any) -> Plant:
    """The traced joint graph, edited at each node of an operator."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        module: Any = sys.modules["aotautograd.api"]
        right = module.trace_joint

        def trace_joint(*args: Any, **kwargs: Any) -> Any:
            joint = right(*args, **kwargs)
            for node in joint.module.graph.find_nodes(op="call_function", target=overload):
                edit(joint.module.graph, node)
            joint.module.recompile()
            return joint

        patch.setattr(module, "trace_joint", trace_joint)

    return plant


def _negated(graph: fx.Graph, node: fx.Node) -> None:
    with graph.inserting_after(node):
        other = graph.call_function(aten.neg.default, (node,))
    other.meta = dict(node.meta)
    node.replace_all_uses_with(other, delete_user_cb=lambda user: user is not other)


def _passed_on(graph: fx.Graph, node: fx.Node) -> None:
    """The derivative is dropped: the gradient goes through as it came."""
    node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]


def _no_gradient(graph: fx.Graph, node: fx.Node) -> None:
    with graph.inserting_after(node):
        other = graph.call_function(aten.sub.Tensor, (node, node))
    other.meta = dict(node.meta)
    node.replace_all_uses_with(other, delete_user_cb=lambda user: user is not other)


def _aborted(graph: fx.Graph, node: fx.Node) -> None:
    os.abort()


def _becomes(other: Any) -> Callable[[fx.Graph, fx.Node], None]:
    def edit(graph: fx.Graph, node: fx.Node) -> None:
        node.target = other

    return edit


def _refused(graph: fx.Graph, node: fx.Node) -> None:
    raise NotImplementedError("planted")


def _text(*changes: tuple[str, str], where: str = "") -> Plant:
    """Another text of the kernels, of those that have `where` in them."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        generate = CppBackend.generate

        def wrong(self: Any, *args: Any) -> Any:
            made = generate(self, *args)
            text = made.text
            for before, after in changes:
                text = re.sub(before, after, text) if where in text else text
            return type(made)(text, made.meta, made.origins)

        patch.setattr(CppBackend, "generate", wrong)

    return plant


def _no_kernel(patch: pytest.MonkeyPatch) -> None:
    generate = CppBackend.generate

    def wrong(self: Any, *args: Any) -> Any:
        made = generate(self, *args)
        if "ferf(" in made.text:
            raise NotImplementedError("planted")
        return made

    patch.setattr(CppBackend, "generate", wrong)


def _wrong_stride(patch: pytest.MonkeyPatch) -> None:
    """A view that keeps the strides of what it looks at."""
    module: Any = sys.modules["torchinductor.lowering.views"]
    right = module.permute

    def permute(ctx: Any, t: Any, dims: Any) -> Any:
        if [t.shape[d] for d in dims] == list(t.shape) or len(dims) != 3:
            return right(ctx, t, dims)
        return module.reshape(ctx, t, tuple(int(t.shape[d].as_int()) for d in dims))

    patch.setitem(sys.modules["torchinductor.lowering.graph"].RULES, "permute", permute)  # type: ignore[attr-defined]


def _wrong_fusion(patch: pytest.MonkeyPatch) -> None:
    """Of kernels in which an exponential and a quotient are fused, the quotient is inverted."""
    _text((r"\((t\d+) / (t\d+)\)", r"(\2 / \1)"), where="exp(")(patch)


def _no_guard(kind: GuardKind, part: str) -> Plant:
    """The guards of a kind whose source names `part` hold always."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        add = GuardSet.add

        def forgetful(self: Any, source: Any, found: Any, *args: Any) -> None:
            if found is not kind or source is None or part not in source.expression():
                add(self, source, found, *args)

        patch.setattr(GuardSet, "add", forgetful)

    return plant


def _captured(edit: Callable[[fx.Node], None], name: str) -> Plant:
    """The captured graph, edited at each call of a function of this name."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        right = torchdynamo.convert._graph_module

        def graph_module(outside: Any, title: str) -> Any:
            for node in outside.recorder.graph.nodes:
                if node.op.startswith("call") and str(getattr(node.target, "__name__", node.target)) == name:
                    edit(node)
            return right(outside, title)

        patch.setattr(torchdynamo.convert, "_graph_module", graph_module)

    return plant


def _stale_global(node: fx.Node) -> None:
    """Capture takes the number that the global was when the module was imported."""
    node.args = tuple(1.5 if arg in (2.0, 3.0) else arg for arg in node.args)


def _to_tanh(node: fx.Node) -> None:
    node.target = torch.tanh if node.op == "call_function" else "tanh"


def _capture_raises(patch: pytest.MonkeyPatch) -> None:
    record = Recorder.record

    def wrong(self: Any, func: Any, *args: Any) -> Any:
        if func is torch.softmax:
            raise AssertionError("planted")
        return record(self, func, *args)

    patch.setattr(Recorder, "record", wrong)


def _capture_dies(patch: pytest.MonkeyPatch) -> None:
    record = Recorder.record

    def wrong(self: Any, func: Any, *args: Any) -> Any:
        if func is torch.softmax:
            os.kill(os.getpid(), signal.SIGBUS)
        return record(self, func, *args)

    patch.setattr(Recorder, "record", wrong)


_NULL = r"(*(volatile float*)0 = 1.0f)*("
_TRAP = r"(__builtin_trap(), 1.0f)*("

FAULTS = (
    Planted("rule of gelu forgets a factor", "prims", "gelu", _half(aten.gelu.default)),
    Planted("rule of softmax forgets a factor", "prims", "softmax", _half(aten._softmax.default)),
    Planted("rule of sigmoid's gradient forgets a factor", "prims", "sigmoid", _half(aten.sigmoid_backward.default)),
    Planted("rule of tanh is sigmoid's", "prims", "tanh", _rule(aten.tanh.default, lambda r, b, x: r[aten.sigmoid.default](b, x))),
    Planted("rule of gelu raises", "prims", "gelu", _rule(aten.gelu.default, _raise), raises=True),
    Planted("joint: gelu's gradient has another sign", "joint", "gelu", _joint(_negated, aten.gelu_backward.default)),
    Planted("joint: tanh's derivative is dropped", "joint", "tanh", _joint(_passed_on, aten.tanh_backward.default)),
    Planted("joint: sigmoid's gradient is dropped", "joint", "sigmoid", _joint(_no_gradient, aten.sigmoid_backward.default)),
    Planted("joint: tanh becomes sigmoid", "joint", "tanh", _joint(_becomes(aten.sigmoid.default), aten.tanh.default)),
    Planted("joint: the trace raises at softmax", "joint", "softmax", _joint(_refused, aten._softmax.default), raises=True),
    Planted("kernels: tanh's text is sin's", "kernels", "tanh", _text((r"tanhf\(", "sinf("))),
    Planted("kernels: erf's text is sin's", "kernels", "gelu", _text((r"ferf\(", "sinf("))),
    Planted("kernels: a maximum begins at zero", "kernels", "amax", _text((r"\(-__builtin_inff\(\)\)", "(0.25f)"))),
    Planted("kernels: a root is none", "kernels", "layer_norm", _text((r"__builtin_sqrtf\(", "("))),
    Planted("kernels: a wrong stride", "kernels", "matmul", _wrong_stride),
    Planted("kernels: a wrong fusion", "kernels", "softmax", _wrong_fusion),
    Planted("kernels: generation raises at erf", "kernels", "gelu", _no_kernel, raises=True),
    Planted("guards: a global's is missing", "guards", "mul", _no_guard(GuardKind.EQUALS, "SCALE")),
    Planted("guards: an attribute's is missing", "guards", "relu", _no_guard(GuardKind.EQUALS, "gated")),
    Planted("capture: a stale global", "capture", "mul", _captured(_stale_global, "mul")),
    Planted("capture: sigmoid becomes tanh", "capture", "tanh", _captured(_to_tanh, "sigmoid")),
    Planted("capture: raises at softmax", "capture", "softmax", _capture_raises, raises=True),
    Planted("kernels: erf's writes to null", "kernels", "gelu", _text((r"\bferf\(", _NULL)), dies="SIGSEGV"),
    Planted("kernels: tanh's is a trap", "kernels", "tanh", _text((r"\btanhf\(", _TRAP)), dies="SIGILL"),
    Planted("rule of softmax aborts", "prims", "softmax", _rule(aten._softmax.default, _dies(signal.SIGABRT)), dies="SIGABRT"),
    Planted("rule of sigmoid's gradient divides by zero", "prims", "sigmoid", _rule(aten.sigmoid_backward.default, _dies(signal.SIGFPE)), dies="SIGFPE"),
    Planted("joint: the trace aborts at tanh's gradient", "joint", "tanh", _joint(_aborted, aten.tanh_backward.default), dies="SIGABRT"),
    Planted("capture: dies at softmax", "capture", "softmax", _capture_dies, dies="SIGBUS"),
)  # fmt: skip


@contextmanager
def planted(fault: Planted) -> Iterator[None]:
    """A block in which the stages have the fault."""
    patch = pytest.MonkeyPatch()
    torchcompile.reset()
    try:
        fault.plant(patch)
        yield
    finally:
        patch.undo()
        torchcompile.reset()


def is_named(fault: Planted, text: str) -> bool:
    """Whether a text names the stage, and the operator behind it."""
    return f"stage {fault.stage}:" in text and fault.operator in text.partition("operator that")[2]


def minified(fault: Planted, folder: Path) -> Minified:
    """What `minify` makes of the script under the fault."""
    script = folder / "block.py"
    script.write_text(SCRIPT)
    with planted(fault), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return minify_script(script, [], folder, lambda text: None)


def shown_by(path: Path) -> str:
    """What a file of `minify` raises."""
    before = os.environ.get("TORCHCOMPILE_VERIFY")
    try:
        runpy.run_path(str(path), run_name="__main__")
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        os.environ.pop("TORCHCOMPILE_VERIFY", None)
        if before is not None:
            os.environ["TORCHCOMPILE_VERIFY"] = before
    return ""


def verified(fault: Planted, folder: Path) -> str:
    """What `verify` says of the script under the fault: the error's text, or the warning's where a graph runs eagerly."""
    script = folder / "block.py"
    script.write_text(SCRIPT)
    with planted(fault), pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        patch.setenv("TORCHCOMPILE_VERIFY", "1")
        raised = shown_by(script)
    return raised or "\n".join(str(warning.message) for warning in warned if "crashes" in str(warning.message))


def death_by(path: Path) -> str:
    """The signal that a file of `minify` dies of."""
    found = in_child(lambda tell: shown_by(path), 60.0)
    return found.what if isinstance(found, Death) else ""


def says_again(fault: Planted, path: Path) -> bool:
    """Whether a file of `minify` shows the fault. It verifies whole calls, so that of a death in capture it tells."""
    with planted(fault):
        if fault.dies and fault.stage != "capture":
            return death_by(path) == fault.dies
        return fault.dies in shown_by(path) if fault.dies else bool(shown_by(path))


def row(fault: Planted) -> tuple[bool, str]:
    """Whether a fault was named and reduced, and its line of the page."""
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        by_verify = (
            "an error, no difference" if fault.raises else ("yes" if is_named(fault, verified(fault, folder)) else "NO")
        )
        found = minified(fault, folder)
        told = str(found.fault)
        named = is_named(fault, told)
        again = "no file"
        if found.path is not None:
            again = "yes" if says_again(fault, found.path) else "NO"
    well = named and found.lines <= 10 and by_verify != "NO" and again == "yes"
    operator = found.fault.operator if found.fault is not None else ""
    below = ", ".join(found.fault.below) if found.fault is not None else ""
    cells = (
        fault.name, found.fault.stage if found.fault is not None else "none", f"{operator}{f' ({below})' if below else ''}",
        by_verify, "yes" if named else "NO", str(found.lines), again, f"{time.perf_counter() - began:.0f}",
    )  # fmt: skip
    return well, "| " + " | ".join(cells) + " |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("names", nargs="*", help="parts of faults' names (all)")
    given = parser.parse_args()
    rows, well = [], 0
    chosen = [f for f in FAULTS if not given.names or any(name in f.name for name in given.names)]
    for fault in chosen:
        right, line = row(fault)
        well += right
        rows.append(line)
        print(line, flush=True)
    head = "| fault | stage | operator (of the stage's graph) | `verify` names it | `minify` names it | lines left | the file shows it | seconds |"
    text = textwrap.dedent(
        f"""\
        # Planted faults

        Each fault is planted alone, by `packages/compile/tests/planted_faults.py`, into the stages under a small
        transformer block that is trained. Named is a fault by its stage and its operator. {well} of {len(chosen)} are named and
        reduced to at most ten lines, in a file that shows the fault alone. Written by `make faults`.
        """
    )
    if given.out is not None:
        given.out.write_text("\n".join([text, head, "|" + "---|" * 8, *rows]) + "\n")
    print(f"{well} of {len(chosen)}")
    return 0 if well >= len(chosen) - 1 else 1


if __name__ == "__main__":
    sys.exit(main())
