"""Tables of rules: which ATen overload is rewritten by which function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch._ops import OpOverload, OpOverloadPacket

Rule: TypeAlias = Callable[..., Any]  # rule(builder, *args, **kwargs) -> Value | tuple | None


def is_functional(overload: OpOverload) -> bool:
    """Whether the schema takes and gives tensors and writes to none of them."""
    schema = overload._schema
    writes = any(a.alias_info is not None and a.alias_info.is_write for a in schema.arguments)
    return not writes and not schema.is_mutable


def _takes_and_gives_tensors(overload: OpOverload) -> bool:
    schema = overload._schema
    returns = str(schema.returns[0].type) if schema.returns else ""
    takes = any("Tensor" in str(a.type) for a in schema.arguments)
    return takes and "Tensor" in returns


def functional_overloads(packet: OpOverloadPacket) -> list[OpOverload]:
    """The functional overloads of a packet that take tensors and give tensors."""
    found = [getattr(packet, name) for name in packet.overloads()]
    return [o for o in found if is_functional(o) and _takes_and_gives_tensors(o)]


class RuleTable(dict[OpOverload, Rule]):
    """A dict with a decorator form: `@table(aten.a.default, aten.b.Tensor)`.

    A packet stands for its functional overloads. An overload that this version of torch lacks is named by a
    string, `"aten::name.overload"`, and is left out where it does not exist.
    """

    def __call__(self, *targets: OpOverload | OpOverloadPacket | str) -> Callable[[Rule], Rule]:
        def add(rule: Rule) -> Rule:
            for target in targets:
                self.add(target, rule)
            return rule

        return add

    def add(self, target: OpOverload | OpOverloadPacket | str, rule: Rule) -> None:
        if isinstance(target, str):
            found = _find(target)
            if found is None:
                return
            target = found
        overloads = functional_overloads(target) if isinstance(target, OpOverloadPacket) else [target]
        for overload in overloads:
            if overload in self:
                raise ValueError(f"two rules for {overload}")
            self[overload] = rule


def _find(name: str) -> OpOverload | OpOverloadPacket | None:
    namespace, _, rest = name.partition("::")
    packet_name, _, overload = rest.partition(".")
    packet = getattr(getattr(torch.ops, namespace), packet_name, None)
    if packet is None or not overload:
        return packet
    return getattr(packet, overload, None)
