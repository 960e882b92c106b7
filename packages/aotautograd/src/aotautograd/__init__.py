"""Forward and backward graphs of any differentiable PyTorch program, ahead of time."""

__version__ = "0.1.0"
