"""NumPy arrays whose elements are not known while a program is captured: tensors in the graph."""
