"""nn.Module: attribute reads and calls without interpreting torch's own machinery, where it does nothing."""

from __future__ import annotations

import torch
from torch import nn

from torchdynamo.outside.externals import External, Externals
from torchdynamo.outside.overlays import MISSING, Overlays
from torchdynamo.schemas import GuardKind
from torchdynamo.sources import InstanceAttribute, Item, instance_dict

# Torch's own, whatever a program puts in their place.
_PLAIN_GETATTR, PLAIN_SETATTR = nn.Module.__getattr__, nn.Module.__setattr__
REGISTRIES = ("_parameters", "_buffers", "_modules")
_HOOKS = ("_backward_pre_hooks", "_backward_hooks", "_forward_pre_hooks", "_forward_hooks")
_GLOBAL_HOOKS = (
    "_global_backward_pre_hooks",
    "_global_backward_hooks",
    "_global_forward_pre_hooks",
    "_global_forward_hooks",
)


def registered(externals: Externals, module: External, name: str) -> object:
    """What `nn.Module.__getattr__` finds for `name` in the registries, or MISSING.

    The registries keep a name in one place (`nn.Module.__setattr__` moves it), so that the item's own
    guard is enough: a name that leaves its registry makes the read fail.
    """
    attributes = instance_dict(module.original)
    for registry in REGISTRIES:
        table = attributes.get(registry)
        if not isinstance(table, dict) or id(table) in externals.by_original:
            continue  # the program holds the registry itself: its shadow answers
        if name in table:
            return externals.wrap(table[name], Item(InstanceAttribute(module.source, registry), name))
    return MISSING


def shadowed_registry(externals: Externals, module: External, name: str) -> object:
    """The same lookup in registries that the program holds as shadows."""
    attributes = instance_dict(module.original)
    for registry in REGISTRIES:
        known = externals.by_original.get(id(attributes.get(registry)))
        if known is not None and isinstance(known.value, dict) and name in known.value:
            return known.value[name]
    return MISSING


def has_buffer(externals: Externals, module: External, name: str) -> bool:
    """Whether the module has a buffer of that name, and nobody is told of another in its place, which is guarded."""
    attributes = instance_dict(module.original)
    held = attributes.get("_buffers")
    if id(attributes) in externals.by_original or not isinstance(held, dict) or name not in held:
        return False
    hooks = torch.nn.modules.module._global_buffer_registration_hooks
    if hooks or id(hooks) in externals.by_original:
        return False
    source = externals.pins.source(torch.nn.modules.module, torch.nn.modules.module.__name__)
    externals.guard(InstanceAttribute(source, "_global_buffer_registration_hooks"), GuardKind.LENGTH, 0)
    return True


def lacks(externals: Externals, module: External, name: str) -> bool:
    """Whether `nn.Module.__getattr__` finds nothing, with guards on that. Its whole `__dict__` would be
    too much: modules that are built alike differ there, in a layer's own number, say."""
    attributes = instance_dict(module.original)
    if name in attributes or id(attributes) in externals.by_original:
        return False
    tables = [attributes.get(registry) for registry in REGISTRIES]
    if any(type(table) is not dict or id(table) in externals.by_original or name in table for table in tables):
        return False
    for registry in REGISTRIES:
        externals.guard(InstanceAttribute(module.source, registry), GuardKind.KEY_ABSENT, name)
    return True


def has_plain_call(externals: Externals, overlays: Overlays, module: External) -> bool:
    """Whether calling the module is calling its `forward`: no hooks on it or on all modules, with guards on that."""
    attributes = instance_dict(module.original)
    for name in _HOOKS:
        table = attributes.get(name)
        if table is None or table or overlays.read(module.value, name) is not MISSING:
            return False
        known = externals.by_original.get(id(table))
        if known is not None and known.value:
            return False
    for name in _GLOBAL_HOOKS:
        table = getattr(torch.nn.modules.module, name)
        known = externals.by_original.get(id(table))
        if table or (known is not None and known.value):
            return False
    for name in _HOOKS:
        externals.guard(InstanceAttribute(module.source, name), GuardKind.LENGTH, 0)
    if not externals.knows_hooks_of_all:
        externals.knows_hooks_of_all = True
        source = externals.pins.source(torch.nn.modules.module, torch.nn.modules.module.__name__)
        for name in _GLOBAL_HOOKS:
            externals.guard(InstanceAttribute(source, name), GuardKind.LENGTH, 0)
    return True


def has_backward_hooks(module: nn.Module) -> bool:
    """Whether hooks of the module, or of all modules, run in its backward."""
    return any(getattr(module, name) for name in _HOOKS[:2]) or any(
        getattr(torch.nn.modules.module, name) for name in _GLOBAL_HOOKS[:2]
    )


def has_no_hooks(module: nn.Module) -> bool:
    """The same question of a module that the program made itself."""
    return not any(getattr(module, name) for name in _HOOKS) and not any(
        getattr(torch.nn.modules.module, name) for name in _GLOBAL_HOOKS
    )


def uses_plain_getattr(kind: type) -> bool:
    """Whether attributes of modules of a class are found as `nn.Module` finds them."""
    return (
        getattr(kind, "__getattr__", None) is _PLAIN_GETATTR
        and vars(object)["__getattribute__"] is kind.__getattribute__
    )
