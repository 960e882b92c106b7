"""A closed set of primitive operators for PyTorch: decompositions, fake tensors, symbolic sizes."""

__version__ = "0.1.0"
