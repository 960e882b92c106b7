"""What becomes of each overload in torch.ops.aten: the census behind `python -m primtorch coverage`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from html import escape

import torch
from torch._ops import OpOverload

from primtorch.decompose import decompositions
from primtorch.effects import said_writes
from primtorch.prims import PRIMS

_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd


class Class(Enum):
    """How a graph that holds the overload is brought into the set."""

    PRIM = "prim"
    DECOMPOSED = "decomposed"
    DERIVED = "derived"
    COMPOSITE = "composite by dispatcher"
    OUT_OF_SCOPE = "out of scope"
    MISSING = "missing"


class Reason(Enum):
    """Why an overload is out of scope."""

    SPARSE = "sparse layouts"
    QUANTIZED = "quantized tensors"
    NESTED = "nested tensors"
    NAMED = "named dimensions"
    VENDOR = "one vendor's kernel"
    PYTHON = "on Python numbers, strings and lists, not tensors"
    AUTOGRAD = "internals of autograd, functionalization or forward-mode differentiation"
    FOREACH = "lists of tensors of the optimizers"
    ANSWER = "give the program a Python bool that depends on data or identity"
    HELPER = "the inner half of an operator that is covered; never dispatched by itself"


@dataclass(frozen=True)
class Entry:
    """One overload and what becomes of it."""

    overload: OpOverload
    kind: Class
    reason: Reason | None = None


@dataclass(frozen=True)
class _Names:
    """What operators are called that are out of scope for one reason: parts of names, how names start, whole names."""

    parts: str = ""
    starts: str = ""
    whole: str = ""


_OUT_OF_SCOPE: dict[Reason, _Names] = {
    Reason.SPARSE: _Names(
        parts="sparse coalesce hspmm _spdiags _csr _csc _bsr _bsc to_dense _spsolve",
        whole=(
            "_indices _values crow_indices col_indices ccol_indices row_indices indices values _nnz _dimI _dimV "
            "dense_dim values_copy indices_copy _indices_copy _values_copy crow_indices_copy col_indices_copy "
            "ccol_indices_copy row_indices_copy"
        ),
    ),
    Reason.QUANTIZED: _Names(
        parts=(
            "quant fbgemm q_scale q_zero q_per_channel qscheme int_repr _int4 _int8 _weight_int _dyn_quant "
            "_choose_qparams _scaled_mm _scaled_grouped _make_per _fused_moving_avg _empty_affine _empty_per"
        ),
    ),
    Reason.NESTED: _Names(parts="nested jagged _padded_dense to_padded_tensor"),
    Reason.NAMED: _Names(parts="rename refine_names align_"),
    Reason.VENDOR: _Names(
        parts=(
            "mkldnn cudnn miopen mps vulkan xnnpack metal _cslt hip xpu nnpack _cufft _cuda _triton _thnn "
            "_transformer_encoder _native_multi_head _flash_attention _efficient_attention _cudnn_attention "
            "_fused_sdp _overrideable _convolution_mode _mixed_dtypes _int_mm _grouped_mm _wrapped_ _cpu_fallback "
            "_transform_bias_rescale_qkv _fill_mem_eff"
        ),
    ),
    Reason.FOREACH: _Names(parts="_foreach _fused_adam _fused_sgd _fused_adagrad _amp_"),
    Reason.PYTHON: _Names(whole="from_file"),
    Reason.AUTOGRAD: _Names(
        starts=(
            "_fw_primal _make_dual _unpack_dual _new_zeros_with_same_feature _has_same_storage _version retain_grad "
            "retains_grad requires_grad_ output_nr is_leaf record_stream _functional_ _propagate_xla _to_cpu "
            "_lazy_clone pin_memory _pin_memory is_pinned _validate _assert _debug _test_ _print _async_error "
            "_remove_batch _add_batch _copy_from _efficientzerotensor _make_dep_token _foobar _resize resize set_ "
            "glu_jvp glu_backward_jvp slice_inverse"
        ),
        whole="_backward data set_data set",
    ),
    Reason.ANSWER: _Names(whole="equal allclose is_same_size is_set_to"),
    Reason.HELPER: _Names(
        whole=(
            "_cummax_helper _cummin_helper _index_put_impl _index_put_impl_ _compute_linear_combination "
            "_slow_conv2d_backward"
        ),
    ),
}


def _reason(overload: OpOverload) -> Reason | None:
    name = overload._schema.name.split("::")[1]
    if "name" in overload._overloadname or "Dimname" in str(overload._schema):
        return Reason.NAMED
    types = [str(a.type) for a in overload._schema.arguments] + [str(r.type) for r in overload._schema.returns]
    if not any("Tensor" in t for t in types):
        return Reason.PYTHON
    for matches in (
        lambda names: name in names.whole.split(),
        lambda names: any(part in name for part in names.parts.split()),
        lambda names: name.startswith(tuple(names.starts.split())),
    ):
        for reason, names in _OUT_OF_SCOPE.items():
            if matches(names):
                return reason
    return None


def _functional_form(overload: OpOverload) -> str | None:
    """The name of the functional operator that an in-place or out= variant writes the result of."""
    schema = overload._schema
    if not said_writes(overload):
        return None
    name = schema.name.split("::")[1]
    return name[:-1] if name.endswith("_") and not name.endswith("__") else name


def census() -> Iterator[Entry]:
    """Every overload of `torch.ops.aten`, by name."""
    rules = decompositions()
    whole = {p.aten for p in PRIMS.values() if p.aten is not None}
    known = {op._schema.name.split("::")[1] for op in rules}
    for name in sorted(torch._C._dispatch_get_all_op_names()):
        packet, _, overload = name.removeprefix("aten::").partition(".")
        if name.startswith("aten::") and (found := _overload(packet, overload or "default")) is not None:
            yield classify(found, rules, whole, known)


def _overload(packet: str, overload: str) -> OpOverload | None:
    """The overload as Python sees it; the dispatcher also lists some that have no schema."""
    try:
        found = getattr(getattr(torch.ops.aten, packet), overload)
    except (AttributeError, RuntimeError):
        return None
    return found if isinstance(found, OpOverload) else None


def classify(overload: OpOverload, rules: object, whole: set[OpOverload], known: set[str]) -> Entry:
    """What becomes of an overload: it is a prim, has a rule, is out of scope for a reason, or is missing."""
    if overload in whole:
        return Entry(overload, Class.PRIM)
    if overload in rules:  # type: ignore[operator]
        return Entry(overload, Class.DECOMPOSED)
    reason = _reason(overload)
    if reason is not None:
        return Entry(overload, Class.OUT_OF_SCOPE, reason)
    if not torch._C._dispatch_has_kernel(overload.name()):  # TorchScript's own, never dispatched
        return Entry(overload, Class.OUT_OF_SCOPE, Reason.PYTHON)
    if torch._C._dispatch_has_kernel_for_dispatch_key(overload.name(), _COMPOSITE):
        return Entry(overload, Class.COMPOSITE)
    functional = _functional_form(overload)
    if functional is not None and (functional in known or _is_composite(functional)):
        return Entry(overload, Class.DERIVED)
    return Entry(overload, Class.MISSING)


def _is_composite(name: str) -> bool:
    packet = getattr(torch.ops.aten, name, None)
    return packet is not None and any(
        torch._C._dispatch_has_kernel(getattr(packet, o).name())
        and torch._C._dispatch_has_kernel_for_dispatch_key(getattr(packet, o).name(), _COMPOSITE)
        for o in packet.overloads()
    )


def report(*, missing: bool = False) -> str:
    """The census as text: totals, and a table by family; with `missing`, also the overloads that nothing covers."""
    entries = list(census())
    rows = [f"{name:26} {count:5} {covered:5}" for name, count, covered in _families(entries)]
    lines = [_totals(entries), "", f"{'family, functional in scope':26} {'':4} covered", *rows]
    if missing:
        lines += ["", "missing:"] + [f"  {e.overload}" for e in entries if e.kind is Class.MISSING]
    return "\n".join(lines)


def _totals(entries: Sequence[Entry]) -> str:
    kinds = Counter(e.kind for e in entries)
    reasons = Counter(e.reason for e in entries if e.reason is not None)
    lines = [f"{len(entries)} overloads in torch.ops.aten, torch {torch.__version__}", ""]
    lines += [f"{kind.value:26} {kinds[kind]:5}" for kind in Class]
    lines += ["", "out of scope:"] + [f"  {reason.value:66} {count:5}" for reason, count in reasons.most_common()]
    inside = len(entries) - kinds[Class.OUT_OF_SCOPE]
    functional = [e for e in entries if e.kind is not Class.OUT_OF_SCOPE and _functional_form(e.overload) is None]
    covered = sum(e.kind is not Class.MISSING for e in functional)
    lines += [
        "",
        f"in scope: {inside}, covered {100 * (1 - kinds[Class.MISSING] / inside):.1f}%; "
        f"functional: {len(functional)}, covered {100 * covered / len(functional):.1f}%",
    ]
    return "\n".join(lines)


def _families(entries: Sequence[Entry]) -> list[tuple[str, int, int]]:
    """(family, its functional overloads in scope, how many are covered), the largest first.

    A family is the part of a name before its first underscore. Those of one or two overloads, all covered, are one row,
    "others".
    """
    families: dict[str, list[Entry]] = {}
    for entry in entries:
        if entry.kind is not Class.OUT_OF_SCOPE and _functional_form(entry.overload) is None:
            name = entry.overload._schema.name.split("::")[1].lstrip("_")
            families.setdefault(name.split("_")[0], []).append(entry)
    rows: list[tuple[str, int, int]] = []
    others = 0
    for name, members in sorted(families.items(), key=lambda item: (-len(item[1]), item[0])):
        covered = sum(e.kind is not Class.MISSING for e in members)
        if len(members) > 2 or covered < len(members):
            rows.append((name, len(members), covered))
        else:
            others += len(members)
    return [*rows, ("others", others, others)]


_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>ATen in prims</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }}
table {{ border-collapse: collapse; width: 100%; }} td, th {{ text-align: left; padding: .15rem .6rem; }}
tr:nth-child(even) {{ background: color-mix(in srgb, currentColor 6%, transparent); }}
td.number {{ text-align: right; font-variant-numeric: tabular-nums; }} code {{ font-size: .92em; }}
.missing {{ color: #b3261e; }}
</style>
<h1>ATen in prims</h1>
<pre>{summary}</pre>
<h2>By family</h2>
<p>Functional overloads in scope. A family is the part of a name before its first underscore.</p>
<table><tr><th>family</th><th>overloads</th><th>covered</th></tr>{families}</table>
<h2>Every overload</h2>
<table><tr><th>overload</th><th>what becomes of it</th></tr>{rows}</table></html>
"""


def html_page() -> str:
    """The census as one HTML page: the totals, the families, each overload."""
    entries = list(census())
    family_rows = [
        f"<tr><td>{name}</td><td class=number>{count}</td><td class=number>{covered}</td></tr>"
        for name, count, covered in _families(entries)
    ]
    rows = [
        f"<tr class={'missing' if e.kind is Class.MISSING else 'known'}><td><code>{escape(str(e.overload))}</code></td>"
        f"<td>{e.kind.value}{': ' + escape(e.reason.value) if e.reason else ''}</td></tr>"
        for e in entries
    ]
    return _PAGE.format(summary=escape(_totals(entries)), families="".join(family_rows), rows="".join(rows))
