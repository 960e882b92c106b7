"""The C++ executor against the Python reference, instruction by instruction."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import re
import subprocess
import sys
import tempfile
import threading
import weakref

import pytest
import torch

from primtorch.calls import Leaf, Measure, Number, Result
from primtorch.ledger import Event, Ledger
from primtorch.schemas import UserFrame
from primtorch.symbolic.expr import IntExpr, constant, symbol
from primtorch.symbolic.relation import relate
from torchinductor import (
    _C,
    CallInput,
    CallSignature,
    InductorOptions,
    NotForCpp,
    native,
    write_program,
)
from torchinductor.events import MENDED_LAYOUT, tell_mended
from torchinductor.executor import PythonExecutor
from torchinductor.program import (
    Alloc,
    AtenCall,
    Expect,
    Free,
    KernelCall,
    Output,
    Program,
    RandomSeed,
    ReadScalar,
    Require,
    Slot,
    SymbolInput,
    TensorInput,
    TritonCall,
    View,
)
from torchinductor.program_file import _CALLS, KINDS

CPU = torch.device("cpu")
F32 = torch.float32
aten = torch.ops.aten


def tensor_input(slot: int, *shape: int | IntExpr, dtype: torch.dtype = F32) -> TensorInput:
    return TensorInput(f"arg{slot}", slot, dtype, CPU, shape, tuple(1 for _ in shape))


def both(program: Program, make_inputs) -> tuple[list, list]:
    """Results of the C++ executor and of the reference, from equal inputs and an equal generator."""
    torch.manual_seed(3)
    ours = native.prepare(program)(make_inputs())
    torch.manual_seed(3)
    return ours, PythonExecutor(program)(make_inputs())


def from_folder(program: Program, inputs: list) -> list:
    """The program written for C++ and read again, and its results."""
    numbers = [isinstance(item, SymbolInput) for item in program.inputs]
    kinds = [KINDS[1 + isinstance(value, float)] if n else KINDS[0] for n, value in zip(numbers, inputs, strict=True)]
    signature = CallSignature(
        inputs=tuple(
            CallInput(item.name, kind, *() if n else (item.dtype, *2 * ((-1,) * len(item.shape),)))
            for item, kind, n in zip(program.inputs, kinds, numbers, strict=True)
        ),
        measures=tuple(Measure(Leaf(place), "value") for place, n in enumerate(numbers) if n),
        relations={},
        feeds=tuple(Number((("sym", sum(numbers[:place])),)) if n else Leaf(place) for place, n in enumerate(numbers)),
        results=tuple(map(Result, range(len(program.instructions[-1].values)))),
    )
    with tempfile.TemporaryDirectory() as folder:
        write_program(folder, program, (), signature, InductorOptions())
        torch.manual_seed(3)
        return _C.SavedProgram(folder)(inputs)


def check(program: Program, *inputs) -> list:
    ours, oracle = both(program, lambda: list(inputs))
    found = [ours]
    with contextlib.suppress(NotForCpp):
        if not any(isinstance(i, KernelCall) for i in program.instructions) and all(i is not None for i in inputs):
            found.append(from_folder(program, list(inputs)))
    for results in found:
        assert len(results) == len(oracle)
        for a, b in zip(results, oracle, strict=True):
            if isinstance(b, torch.Tensor):
                torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
                assert a.stride() == b.stride() and a.storage_offset() == b.storage_offset()
            else:
                assert a == b and type(a) is type(b)
    return ours


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """A kernel in the generated kernels' ABI: out[i] = a[i] + symbols[1]."""
    folder = tmp_path_factory.mktemp("kernel")
    source = """#include <cstdint>
    extern "C" int add(void* const* buffers, const int64_t* symbols) {
      const float* a = (const float*)buffers[0]; float* out = (float*)buffers[1];
      for (int64_t i = 0; i < symbols[0]; ++i) out[i] = a[i] + symbols[1]; return 0; }"""
    (folder / "k.cpp").write_text(source)
    subprocess.run(["g++", "-O1", "-shared", "-fPIC", "k.cpp", "-o", "k.so"], cwd=folder, check=True)
    return ctypes.CDLL(str(folder / "k.so"))


def address(library: ctypes.CDLL) -> int:
    return ctypes.cast(library.add, ctypes.c_void_p).value or 0


def test_kernel_with_symbolic_sizes(library: ctypes.CDLL) -> None:
    n = symbol("s0")
    program = Program(
        (SymbolInput("n", "s0"), tensor_input(0, n)),
        ("s0",),
        2,
        (),
        (
            Alloc(1, (n,), (1,), F32, CPU),
            KernelCall(0, (0, 1), (n, n * n - n), "add"),
            Output((Slot(1), n + n, 7, None, 2.5)),
        ),
        (address(library),),
    )
    for size in (1, 5, 0, 130):
        x = torch.randn(size)
        out, double, seven, nothing, number = check(program, size, x)
        assert torch.equal(out, x + (size * size - size))
        assert (double, seven, nothing, number) == (2 * size, 7, None, 2.5)


def test_size_expressions_round_like_python() -> None:
    s, t = symbol("s0"), symbol("s1")
    sizes = (s // t, s % t, s - t, -s, s.minimum(t), s.maximum(t), (s + t) * s // t, (s - t) // t, (s - t) % t)
    program = Program((SymbolInput("a", "s0"), SymbolInput("b", "s1")), ("s0", "s1"), 0, (), (Output(sizes),))
    for a, b in [(7, 3), (3, 7), (1, 5), (0, 2), (12, 4)]:
        check(program, a, b)


def test_views_reuse_and_bitcast() -> None:
    program = Program(
        (tensor_input(0, 4, 6),),
        (),
        5,
        (),
        (
            View(1, 0, (6, 2), (1, 6), 6),
            View(2, 1, (2,), (1,), 1),
            View(3, 0, (24,), (1,), 0, torch.int32),
            AtenCall(aten.mul.Tensor, (Slot(1), Slot(1)), (), (4,)),
            Free(1),
            Output((Slot(2), Slot(3), Slot(4))),
        ),
    )
    base = torch.randn(5, 6)
    check(program, base[1:])
    check(program, base[:4])


def test_aten_arguments_of_every_kind() -> None:
    n = symbol("s0")
    program = Program(
        (SymbolInput("n", "s0"), tensor_input(0, n, n), tensor_input(1, n, dtype=torch.int64)),
        ("s0",),
        10,
        (),
        (
            AtenCall(aten.add.Scalar, (Slot(0), n), (("alpha", 2),), (2,)),
            AtenCall(aten.cat.default, ((Slot(0), Slot(2)), 1), (), (3,)),
            AtenCall(aten.index.Tensor, (Slot(3), (None, Slot(1))), (), (4,)),
            AtenCall(aten.split.Tensor, (Slot(0), n - constant(1)), (), (5, None)),
            AtenCall(aten.sum.dim_IntList, (Slot(4), (0,)), (("keepdim", True), ("dtype", torch.float64)), (6,)),
            AtenCall(aten.view.default, (Slot(0), (n * n, 1)), (), (7,)),
            AtenCall(aten.native_layer_norm.default, (Slot(0), (n,), None, None, 1e-5), (), (8, None, 9)),
            Output(tuple(Slot(i) for i in (4, 5, 6, 7, 8, 9))),
        ),
    )
    for size in (3, 6):
        check(program, size, torch.randn(size, size), torch.randint(0, size, (size,)))


def test_a_result_list_of_another_length_is_an_error() -> None:
    program = Program(
        (tensor_input(0, 6),),
        (),
        4,
        (),
        (AtenCall(aten.split.Tensor, (Slot(0), 3), (), (1, 2, 3)), Output((Slot(1),))),
    )
    with pytest.raises(RuntimeError, match="returned 2 tensors, not 3"):
        native.prepare(program)([torch.randn(6)])


def turned(strides: tuple[IntExpr | int, ...]) -> Program:
    """The transpose of an (n, 4) tensor, held to `strides`."""
    n = symbol("n")
    return Program(
        (tensor_input(0, n, 4), SymbolInput("n", "n")),
        ("n",),
        2,
        (),
        (
            AtenCall(aten.t.default, (Slot(0),), (), (1,)),
            Expect(1, (4, n), strides, "aten.t.default"),
            Output((Slot(1),)),
        ),
    )


def test_a_result_in_the_expected_strides_is_left_alone() -> None:
    x = torch.randn(3, 4)
    for run in (native.prepare(turned((1, 4))), PythonExecutor(turned((1, 4)))):
        assert run([x, 3])[0].data_ptr() == x.data_ptr()


def test_a_result_in_other_strides_is_copied_and_told() -> None:
    program, x, ledger = turned((symbol("n"), 1)), torch.randn(3, 4), Ledger()
    text = "aten.t.default returned strides [1, 4] where [3, 1] were expected"
    for prepare in (native.prepare, PythonExecutor):
        ledger.clear()
        run = prepare(program, tell_mended(ledger, "graph_0 forward"))
        with pytest.warns(UserWarning, match=re.escape(text)):
            (result,) = run([x, 3])
        assert ledger.events == (Event(MENDED_LAYOUT, "graph_0 forward", text),)
        assert torch.equal(result, x.t()) and result.stride() == (3, 1)
        for size in (0, 1):  # strides of what is empty, or of one row, address nothing else
            assert run([torch.randn(size, 4), size])[0].shape == (4, size)


def test_a_ledger_may_refuse_other_strides() -> None:
    program, x = turned((symbol("n"), 1)), torch.randn(3, 4)
    for prepare in (native.prepare, PythonExecutor):
        refusing = Ledger(refuse=lambda event: ValueError(str(event)))
        run = prepare(program, tell_mended(refusing, "graph_0 forward"))
        for _ in range(2):
            with pytest.raises(ValueError, match="mended_layout"):
                run([x, 3])
        assert not refusing.events


def test_a_result_of_another_size_is_an_error() -> None:
    for run in (native.prepare(turned((1, 4))), PythonExecutor(turned((1, 4)))):
        with pytest.raises(RuntimeError, match=r"returned a tensor of sizes \[4, 3\], not \[4, 5\]"):
            run([torch.randn(3, 4), 5])


def test_an_undefined_result_has_no_layout() -> None:
    args = (Slot(0), Slot(1), Slot(2), None, (1,), (0,), (1,), False, (0,), 1, (False, True, False))
    program = Program(
        tuple(tensor_input(i, 1, 1, 1) for i in range(3)),
        (),
        5,
        (),
        (
            AtenCall(aten.convolution_backward.default, args, (), (3, 4, None)),
            Expect(3, (1, 1, 1), (1, 1, 1), "aten.convolution_backward.default"),
            Output((Slot(4),)),
        ),
    )
    assert native.prepare(program)([torch.ones(1, 1, 1)] * 3)[0].shape == (1, 1, 1)


def test_python_callable_and_unbacked_symbol() -> None:
    def take(t: torch.Tensor, k: int, scale: float) -> torch.Tensor:
        return t[:k] * scale

    u = symbol("u0")
    program = Program(
        (tensor_input(0, 8), tensor_input(1, dtype=torch.int64)),
        ("u0",),
        5,
        (),
        (
            ReadScalar("u0", 1),
            AtenCall(take, (Slot(0), u, 0.5), (), (2,)),
            Alloc(3, (u, 2), (2, 1), F32, CPU),
            AtenCall(aten.full_like.default, (Slot(3), 1.5), (), (4,)),
            Output((Slot(2), Slot(4), u + constant(1))),
        ),
    )
    for k in (0, 3, 8):
        check(program, torch.randn(8), torch.tensor(k))


def test_a_number_of_data_that_is_required_is_refused_with_the_users_line() -> None:
    u = symbol("u0")
    frames = (UserFrame("model.py", 3, "forward"), UserFrame(f"{torch.__path__[0]}/functional.py", 9, "narrow"))
    for required, told in (
        (Require(relate("le", u, constant(4)), frames), "model.py:3: "),
        (Require(relate("ne", u, constant(7))), ""),
    ):
        program = Program(
            (tensor_input(0, dtype=torch.int64),), ("u0",), 1, (), (ReadScalar("u0", 0), required, Output((u,)))
        )
        assert check(program, torch.tensor(2)) == [2]
        refused = re.escape(f"{told}a number that the data told is refused: {required.condition} does not hold")
        for run in (native.prepare(program), PythonExecutor(program), lambda given, p=program: from_folder(p, given)):
            with pytest.raises(RuntimeError, match=f"^{refused}"):
                run([torch.tensor(7)])


def test_random_seed_draws_from_the_default_generator() -> None:
    program = Program((), (), 2, (), (RandomSeed(0, CPU), RandomSeed(1, CPU), Output((Slot(0), Slot(1)))))
    first, second = check(program)
    assert first.dtype == torch.int64 and first.shape == () and first != second


def test_constants_stay_and_launchers_run() -> None:
    def launcher(tensors, symbols, grid) -> None:
        tensors[1].copy_(tensors[0] * symbols[0] + grid[0])

    program = Program(
        (tensor_input(0, 3),),
        (),
        3,
        ((1, torch.arange(3.0)),),
        (
            Alloc(2, (3,), (1,), F32, CPU),
            TritonCall(0, (4, 1, 1), (0, 2), (3,), "k"),
            Output((Slot(2), Slot(1))),
        ),
        launchers=(launcher,),
    )
    run = native.prepare(program)
    for _ in range(2):
        x = torch.randn(3)
        out, constant = run([x])
        assert torch.equal(out, x * 3 + 4)
        assert torch.equal(constant, torch.arange(3.0))


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ([], "takes 1 inputs, not 0"),
        ([torch.zeros(2), 1], "takes 1 inputs, not 2"),
        ([3], "must be a tensor, not int"),
        ([torch.zeros(2, 2)], "1-d"),
        ([torch.zeros(2, dtype=torch.float64)], "Double"),
        ((torch.zeros(2),), "one list"),
    ],
)
def test_wrong_inputs_are_refused(inputs, message: str) -> None:
    program = Program((tensor_input(0, 2),), (), 1, (), (Output((Slot(0),)),))
    with pytest.raises((ValueError, TypeError), match=message):
        native.prepare(program)(inputs)


def test_a_kernel_is_given_no_memory_that_is_not_there(library: ctypes.CDLL) -> None:
    """What reads a tensor whose storage was given back raises: an empty one has none either, and is read by nobody."""
    n = symbol("s0")
    program = Program(
        (SymbolInput("n", "s0"), tensor_input(0, n)),
        ("s0",),
        2,
        (),
        (Alloc(1, (n,), (1,), F32, CPU), KernelCall(0, (0, 1), (n, n), "add"), Output((Slot(1),))),
        kernels=(address(library),),
    )
    run = native.prepare(program)
    given_back = torch.randn(4)
    given_back.untyped_storage().resize_(0)
    for x in (given_back, torch._efficientzerotensor((4,))):
        with pytest.raises(RuntimeError, match=r"a tensor of sizes \[4\] that a kernel reads or writes has no memory"):
            run([4, x])
    assert run([0, torch.empty(0)])[0].shape == (0,)
    assert run([2, torch.ones(2)])[0].tolist() == [3.0, 3.0]


def test_an_error_names_the_instruction() -> None:
    program = Program(
        (tensor_input(0, 2, 3),),
        (),
        2,
        (),
        (AtenCall(aten.mm.default, (Slot(0), Slot(0)), (), (1,)), Output((Slot(1),))),
    )
    run = native.prepare(program)
    with pytest.raises(
        RuntimeError, match=r"cannot be multiplied[\s\S]*instruction 0 .*%1 = aten.mm.default\(%0, %0\)"
    ):
        run([torch.randn(2, 3)])

    def fails(t: torch.Tensor) -> torch.Tensor:
        raise KeyError("from python")

    program = Program((tensor_input(0, 2),), (), 2, (), (AtenCall(fails, (Slot(0),), (), (1,)), Output((Slot(1),))))
    with pytest.raises(KeyError, match="from python"):
        native.prepare(program)([torch.randn(2)])


def test_consume_lets_dead_inputs_go() -> None:
    alive: list[bool] = []

    def probe(t: torch.Tensor) -> torch.Tensor:
        gc.collect()
        alive.append(watch() is not None)
        return t + 1

    program = Program(
        (tensor_input(0, 2), tensor_input(1, 2)),
        (),
        4,
        (),
        (
            AtenCall(aten.add.Tensor, (Slot(0), Slot(1)), (), (2,)),
            Free(0),
            AtenCall(probe, (Slot(2),), (), (3,)),
            Output((Slot(3),)),
        ),
    )
    run = native.prepare(program)
    inputs = [torch.ones(2), torch.ones(2)]
    watch = weakref.ref(inputs[0])
    (out,) = run.consume(inputs)
    assert inputs == [] and alive == [False]
    assert torch.equal(out, torch.full((2,), 3.0))


def test_runs_below_autograd_and_autocast() -> None:
    program = Program(
        (tensor_input(0, 4, 4),),
        (),
        2,
        (),
        (AtenCall(aten.mm.default, (Slot(0), Slot(0)), (), (1,)), Output((Slot(1),))),
    )
    x = torch.randn(4, 4, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        (out,) = native.prepare(program)([x])
    assert out.dtype == F32 and not out.requires_grad


def test_threads_share_a_program() -> None:
    n = symbol("s0")
    program = Program(
        (SymbolInput("n", "s0"), tensor_input(0, n)),
        ("s0",),
        3,
        (),
        (
            AtenCall(aten.mul.Scalar, (Slot(0), n), (), (1,)),
            AtenCall(aten.view.default, (Slot(1), (n, 1)), (), (2,)),
            Output((Slot(2),)),
        ),
    )
    run = native.prepare(program)
    wrong: list[int] = []

    def work(size: int) -> None:
        for _ in range(200):
            (out,) = run([size, torch.ones(size)])
            if out.shape != (size, 1) or not bool((out == size).all()):
                wrong.append(size)

    threads = [threading.Thread(target=work, args=(k,)) for k in (2, 3, 5, 8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def test_no_references_leak() -> None:
    program = Program(
        (tensor_input(0, 16),),
        (),
        2,
        (),
        (AtenCall(aten.neg.default, (Slot(0),), (), (1,)), Output((Slot(1), None, 3))),
    )
    x = torch.randn(16)
    inputs = [x]
    before = sys.getrefcount(x), sys.getrefcount(None)
    run = native.prepare(program)
    for _ in range(1000):
        run(inputs)
    assert sys.getrefcount(x) == before[0] and abs(sys.getrefcount(None) - before[1]) < 500
    held = weakref.ref(run([x])[0])
    assert held() is None


def test_several_accelerators_are_refused() -> None:
    specs = [TensorInput(f"x{i}", i, F32, torch.device("cuda", i), (2,), (1,)) for i in range(2)]
    with pytest.raises(native.MixedDevices, match="cuda:0, cuda:1"):
        native.prepare(Program(tuple(specs), (), 2, (), (Output((Slot(0),)),)))


def test_the_extension_links_no_cuda_library() -> None:
    """Neither by name nor by symbol. What torch's own libraries link is torch's affair: all of CUDA in some builds."""
    dynamic = subprocess.run(["readelf", "-dW", _C.__file__], capture_output=True, text=True, check=True).stdout
    needed = re.findall(r"\(NEEDED\).*\[(.+)\]", dynamic)
    assert "libc10.so" in needed and not [name for name in needed if re.search("cuda|cudnn|cublas", name)]
    symbols = subprocess.run(["readelf", "--dyn-syms", "-W", _C.__file__], capture_output=True, text=True, check=True)
    unresolved = [line.split()[-1] for line in symbols.stdout.splitlines() if " UND " in line]
    assert unresolved and not [name for name in unresolved if re.search("cuda|cudnn|cublas|^cu[A-Z]", name)]


@pytest.mark.parametrize(
    ("operation", "number", "expected"),
    [("mul", 3, 9), ("mul", 1 << 40, None), ("floordiv", 5, 1), ("floordiv", 0, None), ("ipow", 15, 15**15), ("ipow", 90, None)],
)  # fmt: skip
def test_a_size_is_what_python_computes_or_an_error(operation: str, number: int, expected: int | None) -> None:
    builder = _C.Builder()
    builder.input_symbol("s0", 0)
    builder.output_size((True, builder.value([("sym", 0), ("sym", 0), (operation, 0)], True)))
    program = builder.build(0, 1)
    if expected is None:
        with pytest.raises(RuntimeError, match="64 bits"):
            program([number])
    else:
        assert list(program([number])) == [expected]


def test_a_malformed_size_program_is_refused() -> None:
    for steps in ([("mul", 0)], [("const", 1), ("no such operation", 0)]):
        with pytest.raises(ValueError, match="not a size program"):
            _C.Builder().value(steps, True)


def test_each_call_of_a_builder_has_a_form_in_a_file_or_is_refused() -> None:
    calls = {name for name in vars(_C.Builder) if not name.startswith("_")}
    assert calls - set(_CALLS) == {"build", "stream", "triton", "python", "tune_products", "claim"}


def test_a_call_of_python_has_no_form_in_a_file() -> None:
    program = Program(
        inputs=(tensor_input(0, 3),),
        symbols=(),
        num_slots=2,
        constants=(),
        instructions=(AtenCall(lambda x: x, (Slot(0),), (), (1,)), Output((Slot(1),))),
    )
    with pytest.raises(NotForCpp, match="is no operator of the dispatcher, but a function of Python"):
        from_folder(program, [torch.ones(3)])
