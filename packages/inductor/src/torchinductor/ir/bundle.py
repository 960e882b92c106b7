"""Small kernels that run beside each other as one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from primtorch.once import cached_property
from torchinductor.ir.kernel import Buffer, Kernel


@dataclass(frozen=True)
class Bundle:
    """Planned kernels of one device that touch nothing that another of them writes: one launch runs them all."""

    parts: tuple[Kernel, ...]

    @property
    def name(self) -> str:
        """That of the first kernel: no other operation has it."""
        return self.parts[0].name

    @property
    def device(self) -> torch.device:
        """Where all of them run."""
        return self.parts[0].device

    @property
    def buffers(self) -> Mapping[str, Buffer]:
        """What is known of their buffers."""
        return {name: part.buffers[name] for part in self.parts for name in part.arguments}

    @property
    def origins(self) -> tuple[str, ...]:
        """The nodes behind them."""
        return tuple(origin for part in self.parts for origin in part.origins)

    @property
    def in_place(self) -> tuple[tuple[str, str], ...]:
        """What they write over what they read."""
        return tuple(pair for part in self.parts for pair in part.in_place)

    @cached_property
    def reads(self) -> tuple[str, ...]:
        """Buffers that one of them loads."""
        return tuple(dict.fromkeys(name for part in self.parts for name in part.reads))

    @cached_property
    def writes(self) -> tuple[str, ...]:
        """Buffers that one of them stores to."""
        return tuple(dict.fromkeys(name for part in self.parts for name in part.writes))

    @cached_property
    def arguments(self) -> tuple[str, ...]:
        """The buffers in the order in which the launch takes their pointers: each kernel's own in a row."""
        return tuple(name for part in self.parts for name in part.arguments)

    def __str__(self) -> str:
        return "\n".join([f"bundle of {len(self.parts)}", *map(str, self.parts)])
