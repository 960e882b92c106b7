"""The executor (`torchinductor.native`), and what runs saved programs, which is C++ programs' own."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

_Size = tuple[bool, int]

_Matrix = tuple[int, int, int, int, bool]  # rows, columns, leading dimension, batch stride, transposed

def product_layout(
    a: torch.Tensor, b: torch.Tensor, added: torch.Tensor | None, /
) -> tuple[_Matrix, _Matrix, _Matrix, _Matrix | None, bool, int] | None: ...

_Choice = tuple[int, Sequence[int]]  # bytes of workspace, and an algorithm's eight words

class ProductChoices:
    def __init__(self, path: str, /) -> None: ...
    def find(self, key: str, /) -> _Choice | None: ...
    def remember(self, key: str, choice: _Choice | None, /) -> None: ...

class CompiledProgram:
    def __call__(self, inputs: list[Any], /) -> list[Any]: ...
    def consume(self, inputs: list[Any], /) -> list[Any]: ...

class TritonKernel:
    name: str
    parameters: str
    def __init__(
        self, binary: bytes, name: str, parameters: str, scratch: int, warps: int, warp_size: int, shared: int
    ) -> None: ...
    def launch(self, device: int, stream: int, grid: Sequence[int], cells: Sequence[int]) -> None: ...

class Builder:
    def label(self, text: str) -> None: ...
    def input_tensor(self, name: str, slot: int, dtype: torch.dtype, device: torch.device, dim: int) -> None: ...
    def input_symbol(self, name: str, symbol: int) -> None: ...
    def stream(self, getter: Callable[[int], int], device: int) -> None: ...
    def tune_products(self, path: str, /) -> None: ...
    def constant(self, slot: int, tensor: torch.Tensor) -> None: ...
    def value(self, steps: Sequence[tuple[str, int]], initial: bool) -> int: ...
    def alloc(
        self,
        dst: int,
        shape: Sequence[_Size],
        strides: Sequence[_Size],
        dtype: torch.dtype,
        device: torch.device,
        name: str,
    ) -> None: ...
    def free(self, slot: int, name: str) -> None: ...
    def view(
        self,
        dst: int,
        src: int,
        shape: Sequence[_Size],
        strides: Sequence[_Size],
        offset: _Size,
        dtype: torch.dtype | None,
        name: str,
    ) -> None: ...
    def claim(
        self,
        dst: int,
        src: int,
        shape: Sequence[_Size],
        strides: Sequence[_Size],
        dtype: torch.dtype,
        device: torch.device,
        name: str,
    ) -> None: ...
    def kernel(self, address: int, buffers: Sequence[int], symbols: Sequence[_Size], name: str) -> None: ...
    def triton(
        self,
        handle: TritonKernel,
        grid: Sequence[_Size],
        buffers: Sequence[int],
        written: Sequence[int],
        symbols: Sequence[_Size],
        device: torch.device,
        name: str,
    ) -> None: ...
    def aten(
        self,
        op: str,
        overload: str,
        arguments: Sequence[tuple[str, Any]],
        destinations: Sequence[Any],
        refreshed: Sequence[int],
        name: str,
    ) -> None: ...
    def python(
        self,
        callable: Callable[[Sequence[torch.Tensor], Sequence[int]], Sequence[Any]],
        slots: Sequence[int],
        integers: Sequence[_Size],
        destinations: Sequence[Any],
        name: str,
    ) -> None: ...
    def require(self, value: int, name: str, why: str) -> None: ...
    def read_scalar(self, symbol: int, src: int, refreshed: Sequence[int], name: str) -> None: ...
    def expect(
        self,
        slot: int,
        shape: Sequence[_Size],
        strides: Sequence[_Size],
        source: str,
        mended: Callable[[str], None],
    ) -> None: ...
    def output_none(self) -> None: ...
    def output_slot(self, slot: int) -> None: ...
    def output_size(self, size: _Size) -> None: ...
    def output_float(self, number: float) -> None: ...
    def output_float_value(self, value: int) -> None: ...
    def build(self, slots: int, symbols: int) -> CompiledProgram: ...

class LoadError(RuntimeError): ...

class SavedProgram:
    """`torchinductor::Program`, to try a folder from Python: takes the inputs of a C++ call, and gives its results.

    Raises LoadError; at a call ValueError for inputs that the program was not compiled for.
    """

    def __init__(self, folder: str) -> None: ...
    def __call__(self, inputs: list[Any], /) -> list[Any]: ...
