"""torchcompile.compile(model): the whole compiler stack behind one call."""

__version__ = "0.1.0"
