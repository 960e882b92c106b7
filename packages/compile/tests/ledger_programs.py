"""For every kind of the ledger a program that meets it. The line that it is told for ends in `# here`."""

from __future__ import annotations

import colorsys
import decimal
import dis
import faulthandler
import importlib
import inspect
import io
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import torchdynamo
import torchinductor
from torchdynamo.interpreter import operators
from torchdynamo.interpreter.frame import HANDLERS

Program = Callable[..., Any]


@dataclass(frozen=True)
class Case:
    """What meets a kind.

    Attributes:
        program: called with each of `calls`, compiled with `options`.
        whole: the kind that `fullgraph=True` raises for, where it is not this one but the break that leads to it.
        run: calls the compiled program, where a call alone is not what meets the kind.
    """

    program: Program
    backend: str = "eager"
    calls: tuple[tuple[Any, ...], ...] = ((torch.ones(3),),)
    options: dict[str, Any] = field(default_factory=dict)
    dynamic: bool | None = None
    whole: str | None = None
    run: Callable[[Program, tuple[Any, ...]], Any] = lambda compiled, arguments: compiled(*arguments)

    def place(self) -> tuple[str, int] | None:
        """File and line of the `# here` in the program or in `run`: on its `def`, of the function as a whole."""
        for function in (self.program, self.run):
            lines, start = inspect.getsourcelines(function)
            for number, text in enumerate(lines):
                if text.rstrip().endswith("# here"):
                    return function.__code__.co_filename, start + number * (not text.startswith("def "))
        return None


CASES: dict[str, Case] = {}

# Met by the tests that are named.
ELSEWHERE = {
    "backward_not_cut": "packages/aotautograd/tests/test_aotautograd_stages.py",
    "distributed": "packages/compile/tests/test_compile_distributed.py",
    "repeated_modules": "packages/compile/tests/test_compile_replica_rounds.py",
    "not_in_artifact": "packages/compile/tests/test_compile_artifacts.py",
    "eager_is_faster": "packages/compile/tests/test_compile_never_slower.py",
    "not_verified": "packages/compile/tests/test_compile_faults.py",
    "piece_mended": "packages/compile/tests/test_compile_mixture.py",
    "not_replayed": "packages/inductor/tests/test_inductor_cuda_graphs.py",
    "stance": "packages/compile/tests/test_compile_migration.py",
    "stance_refuses": "packages/compile/tests/test_compile_migration.py",
    "nested_graph": "none: no program is known that gets there",
}


def case(kind: str, **more: Any) -> Callable[[Program], Program]:
    def add(program: Program) -> Program:
        assert kind not in CASES, kind
        CASES[kind] = Case(program, **more)
        return program

    return add


# -- breaks -----------------------------------------------------------------------------------


@case("print")
def prints(x: torch.Tensor) -> torch.Tensor:
    y = x + 1
    print(end="")  # here
    return y * 2


@case("tensor_to_number")
def to_number(x: torch.Tensor) -> torch.Tensor:
    n = (x + 1).data_ptr()  # here
    return x * (n != 0)


@case("tensor_repr")
def shown(x: torch.Tensor) -> tuple[str, torch.Tensor]:
    y = x + 1
    text = f"{y}"  # here
    return text, y * 2


@case("data_dependent_branch")
def branches(x: torch.Tensor) -> torch.Tensor:
    y = x + 1
    if y.sum() > 0:  # here
        return y * 2
    return y


@case("data_dependent_shape")
def depends_on_data(x: torch.Tensor) -> torch.Tensor:
    y = torch.nn.utils.rnn.pack_padded_sequence(x.reshape(1, 3, 1), torch.tensor([2]), batch_first=True)  # here
    return y.data * 2


@case("numpy")
def through_numpy(x: torch.Tensor) -> torch.Tensor:
    y = x + 1
    table = np.unwrap(_TABLE)  # here
    return y * float(table[1])


_TABLE = np.arange(3.0)


@case("c_function")
def calls_c(x: torch.Tensor) -> torch.Tensor:
    y = x + 1
    faulthandler.is_enabled()  # here
    return y * 2


@case("float_of_each_call", whole="tensor_to_number")
def asks_for_an_exact_number(x: torch.Tensor) -> tuple[decimal.Decimal, torch.Tensor]:
    y = x + 1
    exact = decimal.Decimal(y.sum().item())  # here
    return exact, y * 2


@case("list_of_each_length", whole="print")
def reads_a_list_of_each_length(x: torch.Tensor) -> torch.Tensor:
    found: list[torch.Tensor] = []
    while len(found) < 9:
        found.append(x + 1)
        print(end="")
        x = torch.stack(found).mean(0)  # here
    return x


@case(
    "loop_of_each_length",
    calls=tuple(([torch.ones(3)] * n,) for n in (3, 1, 2, 4)),
    whole="recompile_limit",
    options={"recompile_limit": 3},
)
def loops_over_a_list_of_each_length(xs: list[torch.Tensor]) -> torch.Tensor:
    total = torch.zeros(3)
    for x in xs:  # here
        total = total + x
    return total


@case("generator")
def gives_a_generator_that_began(x: torch.Tensor) -> tuple[Any, Any]:
    rows = (x + i for i in range(3))
    first = next(rows)  # here
    return first, rows


async def _doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@case("coroutine")
def runs_a_coroutine(x: torch.Tensor) -> torch.Tensor:
    running = _doubled(x + 1)  # here
    try:
        running.send(None)
    except StopIteration as end:
        x = end.value
    return x + 1


class Prints(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        print(end="")
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 2


@case("autograd_function", calls=((torch.ones(3, requires_grad=True),),))
def applies(x: torch.Tensor) -> torch.Tensor:
    return Prints.apply(x + 1) * 2


def _tells(x: torch.Tensor) -> torch.Tensor:
    print(end="")
    return x.sin()


@case("checkpoint", calls=((torch.ones(3, requires_grad=True),),))
def checkpoints(x: torch.Tensor) -> torch.Tensor:
    return checkpoint(_tells, x + 1, use_reentrant=False) * 2


@torchdynamo.disable
def _as_it_is(x: torch.Tensor) -> torch.Tensor:
    return x.sin()


@case("disabled")
def calls_disabled(x: torch.Tensor) -> torch.Tensor:
    y = _as_it_is(x + 1)  # here
    return y * 2


@torchdynamo.assume_constant_result
def _number_of(x: Any) -> int:
    return 3


@case("constant_result")
def constant_of_a_tensor(x: torch.Tensor) -> torch.Tensor:
    y = x + 1
    return y * _number_of(y)  # here


@case("graph_break")
def asks_for_a_break(x: torch.Tensor) -> torch.Tensor:
    y = x + 1
    torchdynamo.graph_break()  # here
    return y * 2


@case("backward", calls=((torch.ones(3, requires_grad=True) * 2,),))
def differentiates(x: torch.Tensor) -> torch.Tensor:
    y = (x * 2).sum()
    y.backward()  # here
    return y * 2


@case("tensor_hook", calls=((torch.ones(3, requires_grad=True),),))
def hooks(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    y.register_hook(lambda grad: grad * 2)  # here
    y.mul_(2)  # the hook stays with what was there before
    return y


def _hooked() -> nn.Module:
    layer = nn.Linear(3, 3)
    layer.register_full_backward_hook(lambda module, before, after: None)
    return layer


@case("module_hook", calls=((torch.ones(3), _hooked()),))
def hooked_module(x: torch.Tensor, layer: nn.Module) -> torch.Tensor:
    y = x + 1
    y = layer(y)  # here
    return y * 2


def _total(x: torch.Tensor) -> torch.Tensor:
    return x.sin().sum()


@case("function_transform")
def transforms(x: torch.Tensor) -> torch.Tensor:
    y = torch.func.functionalize(_total)(x)  # here
    return y * 2


@case("higher_order_operator")
def asks_for_a_branch(x: torch.Tensor) -> torch.Tensor:
    y = x + 1
    y = torch.cond(y.sum() > 0, lambda t: t.sin(), lambda t: t[:1].cos(), (y,))  # here
    return y * 2


@case("tensor_metadata_write", calls=((torch.ones(3),),))
def writes_metadata(x: torch.Tensor) -> torch.Tensor:
    y = x + 1
    y.resize_(6)  # here
    return y[:3] * 2


@case("leaf")
def makes_a_leaf(x: torch.Tensor) -> torch.Tensor:
    y = (x + 1).detach()
    y.requires_grad_()  # here
    return y * 2


@case("write_through_gaps")
def writes_through_gaps(x: torch.Tensor) -> torch.Tensor:
    y = torch.zeros(7)
    y.unfold(0, 1, 3).add_(1.0)  # here
    return y * 2 + x.sum()


@case("sparse_gradient", calls=((torch.ones(3, 2, requires_grad=True),),))
def looks_up_with_a_sparse_gradient(x: torch.Tensor) -> torch.Tensor:
    places = torch.tensor([0, 2])
    y = nn.functional.embedding(places, x, sparse=True)  # here
    return y * 2


@case("special_tensor", calls=((torch.ones(3), torch.eye(3).to_sparse()),))
def uses_a_sparse_tensor(x: torch.Tensor, sparse: torch.Tensor) -> torch.Tensor:
    y = x + 1
    y = sparse @ y  # here
    return y * 2


_operators = torch.library.Library("ledger_programs", "FRAGMENT")
_operators.define("head(Tensor(a) x) -> Tensor(a)")
_operators.impl("head", lambda x: x[:2], "CompositeExplicitAutograd")
torch.library.register_fake("ledger_programs::head", lambda x: x[:2], lib=_operators)


@case("operator_view")
def calls_an_operator_that_views(x: torch.Tensor) -> torch.Tensor:
    y = x + 1
    y = torch.ops.ledger_programs.head(y)  # here
    return y * 2


class Named(torch.Tensor):
    """Of a class that answers for names that no tensor has."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)


@case("tensor_subclass", calls=((torch.ones(3).as_subclass(Named),),))
def takes_a_subclass(x: torch.Tensor) -> torch.Tensor:  # here
    return x + 1


@case("random_state")
def seeds(x: torch.Tensor) -> torch.Tensor:
    y = x + 1
    torch.seed()  # here
    return y * 2


class Text(io.StringIO):
    """A subclass of a type of C, whose state is C's own."""


@case("rebuild")
def gives_a_stream(x: torch.Tensor) -> tuple[Any, torch.Tensor]:  # here
    return Text("begun"), x + 1


@case("external_write")
def writes_outside(x: torch.Tensor) -> torch.Tensor:
    y = x + 1
    _PLACE.reading = 3  # here
    return y * 2


_PLACE = threading.local()


@case("class")
def returns_a_class(x: torch.Tensor) -> Any:
    y = x + 1

    class Local:  # here
        pass

    return y * 2, Local


@case("exception", whole="program_raised", calls=((torch.ones(3),),) * 3, run=lambda f, a: _caught(f, a))
def raises_again_and_again(x: torch.Tensor) -> torch.Tensor:
    y = x + 1
    raise ValueError("no")  # here
    return y


def _caught(compiled: Program, arguments: tuple[Any, ...]) -> str:
    try:
        compiled(*arguments)
    except (ValueError, AssertionError) as error:
        return str(error)
    return ""


@case("loop", whole="print")
def breaks_in_a_loop(x: torch.Tensor) -> torch.Tensor:
    for i in range(9):  # here
        x = x + i
        print(end="")
    return x


@case("compiler")
def compiles(x: torch.Tensor) -> torch.Tensor:
    y = x + 1
    twice = torchdynamo.optimize(lambda graph, inputs: graph.forward)(lambda z: z * 2)  # here
    return twice(y)


@case("import")
def loads_a_module_again(x: torch.Tensor) -> torch.Tensor:
    y = x + 1
    importlib.reload(colorsys)  # here
    return y * 2


@case("frame_reader")
def executes_text(x: torch.Tensor) -> torch.Tensor:
    y = x + 1
    n = eval("1 + 1")  # here
    return y * n


@case("overlapping_inputs", run=lambda f, a: f(*_overlapping()))
def writes_to_shared_memory(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x.add_(1)  # here
    return x[:2] * y[:2]


def _overlapping() -> tuple[torch.Tensor, torch.Tensor]:
    base = torch.arange(6.0)
    return base[:4], base[2:]


@case("ambient_state")
def collects_warnings(x: torch.Tensor) -> torch.Tensor:
    y = x + 1
    with warnings.catch_warnings(record=True):  # here
        y = y * 2
    return y


@case("unsupported_read")
def reads_an_identity(x: torch.Tensor) -> tuple[bool, torch.Tensor]:
    number = id(x)  # here
    return number > 0, x + 1


# -- what capture is told of beside breaks -----------------------------------------------------


@case("recompile_limit", calls=tuple((torch.ones(3), text) for text in "abc"), options={"recompile_limit": 2})
def many_texts(x: torch.Tensor, text: str) -> torch.Tensor:  # here
    return x + ord(text)


@case("recompile_refused", calls=tuple((torch.ones(3), text) for text in "ab"), options={"on_recompile": "eager"})
def two_texts(x: torch.Tensor, text: str) -> torch.Tensor:  # here
    return x + ord(text)


@case("recompiled", calls=tuple((torch.ones(3), text) for text in "ab"))
def compiled_twice(x: torch.Tensor, text: str) -> torch.Tensor:  # here
    return x + ord(text)


def _differentiated_twice(compiled: Program, arguments: tuple[Any, ...]) -> Any:
    x = arguments[0].clone().requires_grad_()
    (first,) = torch.autograd.grad(compiled(x).sum(), x, create_graph=True)
    return torch.autograd.grad(first.square().sum(), x)


@case(
    "made_for_other_sizes",
    backend="aot_eager",
    calls=((torch.randn(4, 5),), (torch.randn(6, 5),)),
    dynamic=True,
    run=_differentiated_twice,
)
def normalised(x: torch.Tensor) -> torch.Tensor:
    return nn.functional.batch_norm(x, None, None, training=True).tanh()


def _transformed(compiled: Program, arguments: tuple[Any, ...]) -> Any:
    return torch.func.grad(compiled)(*arguments)  # here


@case("transformed_call", run=_transformed)
def is_transformed(x: torch.Tensor) -> torch.Tensor:
    return x.sin().sum()


def _under_derivatives(compiled: Program, arguments: tuple[Any, ...]) -> Any:
    with forward_ad.dual_level():
        x = forward_ad.make_dual(arguments[0], torch.ones(3))
        return compiled(x)  # here


@case("forward_derivatives", run=_under_derivatives)
def is_differentiated_forward(x: torch.Tensor) -> torch.Tensor:
    return x.sin().sum()


class Doubled(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def _under_a_mode(compiled: Program, arguments: tuple[Any, ...]) -> Any:
    with Doubled():
        return compiled(*arguments)  # here


@case("function_mode", run=_under_a_mode)
def runs_under_a_mode(x: torch.Tensor) -> torch.Tensor:
    return x.sin().sum()


def _without_overrides(compiled: Program, arguments: tuple[Any, ...]) -> Any:
    with torch._C.DisableTorchFunction():
        return compiled(*arguments)  # here


@case("disabled_overrides", run=_without_overrides)
def runs_without_overrides(x: torch.Tensor) -> torch.Tensor:
    return x.sin().sum()


def _traced(compiled: Program, arguments: tuple[Any, ...]) -> Any:
    return torch.jit.trace(compiled, arguments, check_trace=False)  # here


@case("foreign_tracer", run=_traced)
def is_traced(x: torch.Tensor) -> torch.Tensor:
    return x.sin().sum()


class _Answering(TorchDispatchMode):
    def __init__(self, function: Program) -> None:
        super().__init__()
        self.function = function

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.function(*args)  # here


def _within_an_operator(compiled: Program, arguments: tuple[Any, ...]) -> Any:
    with _Answering(compiled):
        return arguments[0].neg()


@case("within_operator", run=_within_an_operator)
def implements_an_operator(x: torch.Tensor) -> torch.Tensor:
    return x.sin().sum()


@case("unsplit_frame", whole="rebuild")
def gives_a_stream_again(x: torch.Tensor) -> tuple[Any, torch.Tensor]:  # here
    return Text("begun"), x + 1


def _rows(x: torch.Tensor) -> Iterator[torch.Tensor]:
    for row in x.unbind():
        yield row * 2


@torchdynamo.skip_frame
def _skipped(x: torch.Tensor) -> torch.Tensor:
    return nn.functional.softmax(x, 0) + sum(_rows(x))


@case("suspending_frame", whole="disabled")
def calls_a_generator(x: torch.Tensor) -> torch.Tensor:
    return _skipped(x + 1) * 2


@case("unstarted_generator")
def gives_a_generator(x: torch.Tensor) -> Iterator[torch.Tensor]:
    return _rows(x + 1)


@case("disabled_function", whole="disabled")
def calls_a_skipped_function(x: torch.Tensor) -> torch.Tensor:
    return _skipped(x + 1) * 2


@case("looped_batch")
def without_a_batching_rule(x: torch.Tensor) -> torch.Tensor:
    return torch.vmap(lambda row: torch.histc(row, bins=3))(x.detach()[:, None] * x.detach()).sum() + x


@getattr(torch.compiler, "nested_compile_region", lambda function: function)  # type: ignore[untyped-decorator]
def _takes_a_number(x: torch.Tensor) -> torch.Tensor:
    return x * x.detach().max().item()


@case("region_in_place")
def a_region_that_takes_a_number(x: torch.Tensor) -> torch.Tensor:
    return _takes_a_number(x) + 1  # type: ignore[no-any-return]


@case("library_code", whole="disabled")
def calls_library_code(x: torch.Tensor) -> torch.Tensor:
    return _skipped(x + 1) * 2


@torchdynamo.skip_frame
def _calls_back(function: Callable[[], int]) -> int:
    return function()


def _two() -> int:
    return 2


lazy: list[nn.Module] = []


def with_new_modules(compiled: Program, arguments: tuple[Any, ...]) -> None:
    lazy[:] = [nn.LazyLinear(2)]
    for _ in range(2):
        compiled(*arguments)


@case("lazy_module", run=with_new_modules)
def calls_a_lazy_module(x: torch.Tensor) -> Any:
    return lazy[0](x)


@case("nothing_to_compile", whole="disabled")
def calls_without_tensors(x: torch.Tensor) -> torch.Tensor:
    return x + _calls_back(_two)


@case("program_raised", run=lambda f, a: _caught(f, a))
def raises_once(x: torch.Tensor) -> torch.Tensor:
    y = x + 1
    if len(x) == 3:
        raise ValueError("no")  # here
    return y


@case("condition_not_met", calls=((-torch.ones(3),),), run=lambda f, a: _caught(f, a))
def asserts(x: torch.Tensor) -> torch.Tensor:
    y = x + 1
    assert y.sum() > 0  # here
    return y * 2


@case("raise_was_handled", calls=((-torch.ones(3),),))
def handles_its_own(x: torch.Tensor) -> torch.Tensor:
    y = x + 1
    try:
        if not y.sum() > 0:  # here
            raise ValueError("none is left")
    except ValueError:
        return y
    return y * 2


@case("graph_raised", calls=((torch.ones(3), torch.tensor([7])),))
def indexes(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:  # here
    try:
        return x[i] * 2
    except IndexError:
        return x


@case("raised_at_entry", calls=((torch.ones(3), torch.tensor([7])),), run=lambda f, a: _out_of_bounds(f, a))
def writes_and_indexes(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:  # here
    x.add_(1)
    return x[i] * 2


def _out_of_bounds(compiled: Program, arguments: tuple[Any, ...]) -> str:
    try:
        compiled(*arguments)
    except IndexError as error:
        return str(error)
    return ""


def _faulty(compiled: Program, arguments: tuple[Any, ...]) -> Any:
    with mock.patch.object(operators, "binary", side_effect=KeyError("as if a rule were wrong")):
        return compiled(*arguments)


@case("capture_fault", run=_faulty)
def falls_over_a_fault(x: torch.Tensor) -> torch.Tensor:
    return x + len(x) // 2  # here


# -- breaks that need more than a line ----------------------------------------------------------


@torch.library.custom_op("ledger_tests::without_meta", mutates_args=())
def without_meta(x: torch.Tensor) -> torch.Tensor:
    return x.sin()


@case("operator_without_meta")
def calls_without_meta(x: torch.Tensor) -> torch.Tensor:
    y = x + 1
    y = without_meta(y)  # here
    return y * 2


def _unknown_instruction(compiled: Program, arguments: tuple[Any, ...]) -> Any:
    with mock.patch.dict(HANDLERS):
        del HANDLERS[dis.opmap.get("BINARY_SLICE", dis.opmap["BUILD_SLICE"])]  # from Python 3.12 on
        return compiled(*arguments)


@case("opcode", run=_unknown_instruction)
def slices(x: torch.Tensor) -> torch.Tensor:
    y = x + 1
    kept = slice(len(y) - 1)
    y = y[kept.stop : len(y)]  # here
    return y * 2


@case(
    "symbolic_size",
    calls=((torch.ones(2, 1, 3), nn.LSTM(3, 4).eval()), (torch.ones(5, 1, 3), nn.LSTM(3, 4).eval())),
    dynamic=True,
    whole="print",
)
def runs_a_recurrent_layer(x: torch.Tensor, layer: nn.LSTM) -> torch.Tensor:
    y = x + 1
    with torch.no_grad():
        y, _ = layer(y)  # here
    print(end="")  # in one graph as a whole the size is a number
    return y * 2


# -- the back end -------------------------------------------------------------------------------


@case("no_compiler", backend="inductor", options={"cxx": "/nonexistent/c++"})
def has_no_compiler(x: torch.Tensor) -> torch.Tensor:
    return x + 1


@case("kernels_not_built", backend="inductor", options={"cxx": "false", "cache": "/nonexistent/cache"})
def has_a_compiler_that_fails(x: torch.Tensor) -> torch.Tensor:
    return x * 3 + 1


def _without_rules(compiled: Program, arguments: tuple[Any, ...]) -> Any:
    with mock.patch.object(torchinductor, "compile_graph", side_effect=KeyError("as if a rule were wrong")):
        return compiled(*arguments)


@case("graph_not_compiled", backend="inductor", run=_without_rules)
def falls_over_a_fault_of_the_back_end(x: torch.Tensor) -> torch.Tensor:
    return x * 5 + 1


@case("no_cuda_graph", backend="inductor", options={"cuda_graphs": True})
def is_on_the_cpu(x: torch.Tensor) -> torch.Tensor:
    return x + 1


@case("operator_by_reference", backend="inductor")
def is_complex(x: torch.Tensor) -> torch.Tensor:
    y = torch.complex(x, x)
    return (y + 1).abs()


@torch.library.custom_op("ledger_tests::turned", mutates_args=())
def turned(x: torch.Tensor) -> torch.Tensor:
    return x.t().contiguous().t()


@turned.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@case("mended_layout", backend="inductor", calls=((torch.ones(2, 3),),))
def gives_other_strides(x: torch.Tensor) -> torch.Tensor:
    y = turned(x + 1)  # here
    return y * 2
