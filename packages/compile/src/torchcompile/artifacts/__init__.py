"""Compiled programs in files: what `torchcompile.save` writes and `torchcompile.load` takes in another process."""
