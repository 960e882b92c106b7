"""A third code generation back end: loop IR as Python that works on whole tensors, for any device that PyTorch runs on.

A vendor registers such a class for its device type and has fused kernels for every graph before the first own kernel is
written. Here it takes the place of the C++ back end for "cpu", so that it can be tried on any machine.
"""

import math

import torch

import torchcompile
import torchinductor
from primtorch import prims
from primtorch.symbolic import symbol
from torchinductor import Built, CodegenBackend, KernelSource
from torchinductor.indexing import variable
from torchinductor.ir import compute_dtype
from torchinductor.ops import OpsHandler
from torchinductor.program import TritonCall


class PythonWriter(OpsHandler[str]):
    """Turns the operations of a loop body into lines of Python. A value is the name of a tensor over the loops."""

    def __init__(self, kernel):
        self.pointers = {buffer: f"p{i}" for i, buffer in enumerate(kernel.arguments)}
        self.buffers = kernel.buffers
        self.outer = len(kernel.outer)
        self.grid = [str(axis.size) for axis in (*kernel.outer, *kernel.inner)]
        self.lines = []
        self.carry = {}

    def let(self, text):
        self.lines.append(f"t{len(self.lines)} = {text}")
        return f"t{len(self.lines) - 1}"

    def over_grid(self, value):
        """The value at every point of the loops, the inner ones flattened into the last dimension."""
        return f"{value}.broadcast_to({', '.join(self.grid)}).flatten({self.outer})"

    def load(self, buffer, index, dtype, mask=None):
        place = f"zero + {index}"
        if mask is None:
            return self.let(f"{self.pointers[buffer]}[{place}].to({compute_dtype(dtype)})")
        inside = self.let(f"torch.where({mask}, {place}, 0)")
        return self.let(f"torch.where({mask}, {self.pointers[buffer]}[{inside}].to({compute_dtype(dtype)}), 0)")

    def store(self, buffer, index, value, mode="set", mask=None):
        pointer, dtype = self.pointers[buffer], self.buffers[buffer].dtype
        places, values = self.let(f"zero + {index}"), f"{value}.to({dtype})"
        if mask is not None:
            joined = self.let(f"torch.broadcast_tensors({places}, {values}, {mask})")
            places, values = f"{joined}[0][{joined}[2]]", f"{joined}[1][{joined}[2]]"
        if mode == "set":
            self.let(f"{pointer}.index_put_(({places},), {values})")
        else:
            reduce = {"add": "sum"}.get(mode, mode)
            joined = self.let(f"torch.broadcast_tensors({places}, {values})")
            flat = f"{joined}[0].flatten(), {joined}[1].flatten()"
            self.let(f"{pointer}.scatter_reduce_(0, {flat}, {reduce!r})")

    def constant(self, value, dtype):
        number = repr(value) if not isinstance(value, float) or math.isfinite(value) else f"float({str(value)!r})"
        return self.let(f"torch.tensor({number}, dtype={dtype}, device=device)")

    def index_expr(self, expr, dtype):
        return self.let(f"(zero + {expr}).to({dtype})")

    def indirect(self, value, size):
        return symbol(value)

    def to_dtype(self, value, dtype, source):
        return self.let(f"{value}.to({dtype}).to({compute_dtype(dtype)})")

    def bitcast(self, value, dtype, source):
        return self.let(f"{value}.to({source}).view({dtype}).to({compute_dtype(dtype)})")

    def apply(self, op, *args):
        module = "prims" if op in prims.PRIMS else "torch"
        return self.let(f"{module}.{op}({', '.join(args)})")

    def reduce(self, kind, key, value, position=None):
        flat = self.over_grid(value)
        if position is None:
            accumulator = f", dtype={value}.dtype" if kind in ("sum", "prod") else ""
            result = f"{flat}.{kind}(-1{accumulator})"
        else:
            result = f"{self.over_grid(position)}.gather(-1, {flat}.{kind}(-1, keepdim=True)).squeeze(-1)"
        ones = ", None" * (len(self.grid) - self.outer)
        self.carry[key] = self.let(f"({result})[...{ones}]")

    def carried(self, key, dtype):
        return self.carry[key]

    def scan(self, kind, value, position=None):
        name = {"sum": "cumsum", "prod": "cumprod", "logsumexp": "logcumsumexp"}.get(kind, kind)
        whole = self.let(f"{self.over_grid(value)}.{name}(-1)")
        return (f"{whole}[0]", f"{whole}[1]") if kind in ("cummax", "cummin") else (whole,)


class PythonBackend(CodegenBackend):
    """Python source for each kernel; a launcher is the function that it defines."""

    def generate(self, kernel, options):
        axes = (*kernel.outer, *kernel.inner)
        writer = PythonWriter(kernel)
        for stage in kernel.stages:
            stage.body.replay(writer)
        lines = [f"def kernel({', '.join([*writer.pointers.values(), *kernel.symbols])}):", "    device = p0.device"]
        lines.append(f"    zero = torch.zeros({[1] * len(axes)}, dtype=torch.int64, device=device)")
        for dim, axis in enumerate(axes):
            shape = [-1 if d == dim else 1 for d in range(len(axes))]
            lines.append(f"    {axis.name} = torch.arange({axis.size}, device=device).reshape({shape})")
        return KernelSource("\n".join([*lines, *(f"    {line}" for line in writer.lines)]) + "\n", None, kernel.origins)

    def build(self, sources, options):
        return Built(
            launchers=tuple(launcher(source.text) for source in sources),
            files={f"kernel_{number}.py": source.text for number, source in enumerate(sources)},
        )

    def instruction(self, kernel, source, handle, slots):
        # The instruction for launchers: `launcher(tensors, symbols, grid)`.
        return TritonCall(handle, (1, 1, 1), slots, tuple(map(variable, kernel.symbols)), f"kernel_{handle}")


def launcher(text):
    namespace = {"torch": torch, "prims": prims}
    exec(text, namespace)

    def launch(tensors, symbols, grid):
        # A kernel indexes a buffer by element offsets from its first element.
        flat = [t.as_strided((t.untyped_storage().nbytes() // t.itemsize - t.storage_offset(),), (1,)) for t in tensors]
        namespace["kernel"](*flat, *symbols)

    return launch


if __name__ == "__main__":
    torchinductor.register_codegen("cpu", PythonBackend())
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.LayerNorm(16), torch.nn.Linear(16, 4), torch.nn.Softmax(-1)
    )
    x = torch.randn(5, 8)
    expected = model(x).square().sum()
    gradients = torch.autograd.grad(expected, list(model.parameters()))

    result = torchcompile.compile(model, fullgraph=True)(x).square().sum()
    result.backward()
    torch.testing.assert_close(result, expected)
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)
    print(torchcompile.report())
