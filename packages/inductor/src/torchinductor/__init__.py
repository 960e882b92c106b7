"""Loop IR, fusion and code generation for PyTorch graphs: C++/OpenMP and Triton."""

__version__ = "0.1.0"
