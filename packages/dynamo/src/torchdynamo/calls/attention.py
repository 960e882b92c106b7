"""`flex_attention` in the graph: one node, with what the program does to a score and its mask as graphs inside.

The public functions are taken as a whole: of a block mask the graph reads its tables of blocks as tensors, and captures
its function. What eager refuses breaks the graph, and is refused by eager.
"""

from __future__ import annotations

import math
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx

from primtorch.attention import POSITION, POSITIONS, BlockTables, FlexAttention, working_dtype
from primtorch.fake import FakeTensor
from primtorch.spec import TensorSpec
from torchdynamo.calls.bodies import Bodies, Recorded, refusal

MODULE = "torch.nn.attention.flex_attention"  # which a program that calls nothing of it need not import
WHOLE = 1 << 30  # the size of a block that torch takes for: no blocks
PLAIN_FUNCTIONS = ("_identity", "noop_mask")  # torch's own, where the program gives none
_TABLES = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
_TABLES_BY_KEYS = ("q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices")

Write = Callable[[FlexAttention, Sequence[fx.Node], Sequence[TensorSpec], bool], list[torch.Tensor]]


def flex_attention(
    bodies: Bodies,
    node_of: Callable[[torch.Tensor], fx.Node],
    write: Write,
    query: object,
    key: object,
    value: object,
    score_mod: object = None,
    block_mask: object = None,
    scale: object = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: object = None,
    *,
    return_aux: object = None,
) -> object:
    """The node of a call, and what the call returns. `kernel_options` choose among torch's own kernels, and mean
    nothing here."""
    if return_aux is not None and (return_lse or bodies.world.getattr(return_aux, "max_scores")):
        raise refusal("return_aux of flex_attention with return_lse, or for the highest scores")
    query, key, value = _checked(query, key, value, enable_gqa)
    if scale is None:
        scale = 1.0 / math.sqrt(query.shape[-1])
    if not isinstance(scale, (int, float)):
        raise refusal("a scale that is no number")
    device = query.device
    positions = [(TensorSpec((), (), POSITION, device), False)] * POSITIONS
    derived = torch.is_grad_enabled()
    tables, tensors, mask_mod = _block_mask(bodies, query, key, block_mask, derived)
    score = mask = None
    if score_mod is not None and not _is_plain(score_mod):
        history = derived and (query.requires_grad or key.requires_grad)
        stands = [(TensorSpec((), (), working_dtype(query.dtype), device), history), *positions]
        score = _record(bodies, "score_mod", score_mod, stands)
        if not score.specs[0].dtype.is_floating_point:
            raise refusal("a score_mod that gives no floating-point number")
    if mask_mod is not None:
        mask = _record(bodies, "mask_mod", mask_mod, positions)
        if mask.specs[0].dtype is not torch.bool:
            raise refusal("a mask_mod that gives no bool")
    recorded = [body for body in (score, mask) if body is not None]
    numbers = list(dict.fromkeys(node for body in recorded for node in body.numbers))
    captured = list(dict.fromkeys(node for body in recorded for node in body.tensors))
    made = [bodies.graph(body, [*numbers, *captured]) for body in recorded]
    given = [query, key, value]
    known = [*given, *(node.meta["val"] for node in captured)]
    history = derived and any(tensor.requires_grad for tensor in known)
    if history and tables is not None and not tables.by_keys:
        raise refusal("a gradient by a block mask without tables of the queries' blocks")
    operator = FlexAttention(
        tuple(graph for graph, _ in made),
        len(numbers),
        (history, history),
        scale=float(scale),
        modifies=score is not None,
        masks=mask is not None,
        tables=tables,
    )
    operands = [*numbers, *map(node_of, (*given, *tensors)), *captured]
    with torch._C.DisableTorchFunction():
        specs = operator.results(tuple(node.meta["val"] for node in operands), ())
    out, lse = write(operator, operands, specs, any(effect for _, effect in made))
    if return_aux is not None:
        wanted = lse if bodies.world.getattr(return_aux, "lse") else None
        made = vars(sys.modules[MODULE])["AuxOutput"]
        return out, bodies.world.call(made, (), {"lse": wanted, "max_scores": None})
    return (out, lse) if return_lse else out


def create_mask(bodies: Bodies, mod_fn: object, B: Any, H: Any, Q_LEN: Any, KV_LEN: Any, device: Any = None) -> object:
    """The mask of all positions: its function on four lines of positions, one after the other."""
    if device is None:
        device = torch.accelerator.current_accelerator() or "cpu"
    world = bodies.world
    sizes = (1 if B is None else B, 1 if H is None else H, Q_LEN, KV_LEN)
    lines = [torch.arange(0, size, device=device) for size in sizes]
    if isinstance(mod_fn, types.FunctionType) and mod_fn.__code__.co_argcount != POSITIONS:
        raise refusal("create_mask of a function of a score")
    function = mod_fn
    bodies.interpreter.tail_call = False
    with _by_places(bodies):
        for place in reversed(range(POSITIONS)):
            dims = tuple(0 if other == place else None for other in range(POSITIONS))
            function = world.call(torch.vmap, (function,), {"in_dims": dims, "out_dims": 0})
        return world.call(function, tuple(lines), {})


@contextmanager
def _by_places(bodies: Bodies) -> Iterator[None]:
    """A block in which tensors are indexed by positions."""
    recorder = bodies.recorder
    before, recorder.by_places = recorder.by_places, True
    try:
        yield
    finally:
        recorder.by_places = before


def _record(bodies: Bodies, what: str, function: Any, stands: Sequence[tuple[TensorSpec, bool]]) -> Recorded:
    """A function of positions as a body."""
    with _by_places(bodies):
        make = lambda: tuple(bodies.stand_in(spec, history) for spec, history in stands)
        body = bodies.record(what, function, make, copied=True)
    if len(body.specs) != 1 or body.specs[0].dim():
        raise refusal(f"{what} gives something else than one 0-d tensor")
    return body


def _checked(query: Any, key: Any, value: Any, grouped: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The operands, cast where autocast does."""
    given = (query, key, value)
    if not all(isinstance(t, FakeTensor) and t.dim() == 4 for t in given):
        raise refusal("operands of flex_attention that are no tensors of four dimensions")
    if torch.is_autocast_enabled(query.device.type) and query.dtype is not torch.float64:
        dtype = torch.get_autocast_dtype(query.device.type)
        given = query, key, value = tuple(t if t.dtype is torch.float64 else t.to(dtype) for t in given)
    if any(t.dtype != query.dtype or t.device != query.device for t in given) or not query.dtype.is_floating_point:
        raise refusal("operands of flex_attention of several dtypes or devices, or that are no floating-point numbers")
    if query.dtype.itemsize == 1:
        raise refusal("operands of flex_attention of 8 bits")
    wrong = (
        key.shape[:3] != value.shape[:3]
        or query.shape[3] != key.shape[3]
        or query.shape[0] != key.shape[0]
        or query.shape[1] % key.shape[1] != 0
        or (not grouped and query.shape[1] != key.shape[1])
    )
    if wrong or 0 in (*query.shape, *key.shape, value.shape[3]):
        raise refusal("shapes of operands that flex_attention does not take, or takes otherwise")
    for tensor in given:  # heads and their sizes are those of the program: a kernel is made for them
        int(tensor.shape[1]), int(tensor.shape[3])
    return given


def _block_mask(
    bodies: Bodies, query: torch.Tensor, key: torch.Tensor, block_mask: object, derived: bool
) -> tuple[BlockTables | None, list[torch.Tensor], object]:
    """What a block mask says: its tables, and its function, if there is one."""
    if block_mask is None:
        return None, [], None
    bodies.interpreter.tail_call = False
    attribute: Callable[[str], Any] = lambda name: bodies.world.getattr(block_mask, name)
    function = attribute("mask_mod")
    if getattr(function, "__name__", "") == "_sliced_mask_mod_error":
        raise refusal("a block mask that was sliced")
    function = None if _is_plain(function) else function
    sizes, lengths = attribute("BLOCK_SIZE"), attribute("seq_lengths")
    if sizes[0] == WHOLE and sizes[1] == WHOLE:
        return None, [], function
    if lengths[0] != query.shape[2] or lengths[1] != key.shape[2]:
        raise refusal("a block mask of other lengths")
    found = [attribute(name) for name in _TABLES]
    full = found[2] is not None
    backward = [attribute(name) for name in _TABLES_BY_KEYS] if derived else [None]
    by_keys = backward[0] is not None and (backward[2] is not None) == full
    chosen = [t for t in (*found, *(backward if by_keys else ())) if t is not None]
    for table in chosen:
        if not isinstance(table, FakeTensor) or table.dtype is not torch.int32 or table.device != query.device:
            raise refusal("tables of blocks that are no int32 tensors of the operands' device")
        if any(have not in (1, want) for have, want in zip(table.shape[:2], query.shape[:2], strict=True)):
            raise refusal("tables of blocks of other batches or heads")
    return BlockTables(sizes[0], sizes[1], full, by_keys), chosen, function


def _is_plain(function: Any) -> bool:
    """Whether it is torch's own function that changes nothing."""
    where = getattr(function, "__module__", "")
    return where == MODULE and function.__name__ in PLAIN_FUNCTIONS
