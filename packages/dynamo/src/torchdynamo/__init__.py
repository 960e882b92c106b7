"""Safe graph capture from unmodified Python by a PEP 523 frame hook."""

__version__ = "0.1.0"
