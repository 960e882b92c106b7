"""DDP bucket-aligned graph splitting and FSDP boundaries for captured PyTorch graphs."""

__version__ = "0.1.0"
