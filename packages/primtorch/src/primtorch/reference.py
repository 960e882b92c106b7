"""The reference page of the set of prims, made from the records."""

from __future__ import annotations

from primtorch.prims import PRIMS, SET_VERSION, Prim


def reference_page() -> str:
    """Every prim by family, as Markdown: schema, meaning, tags."""
    families: dict[str, list[Prim]] = {}
    for prim in PRIMS.values():
        families.setdefault(prim.family, []).append(prim)
    lines = [
        "# Prims",
        "",
        f"Version {SET_VERSION} of the set: {len(PRIMS)} prims. Made by `python -m primtorch reference`.",
        "",
        "Arguments come in the order of the schema; those after `*` by name. Operands of an elementwise prim have",
        "one shape and one dtype, or are Python numbers (not all of them); nothing promotes or broadcasts. `Size` is",
        "an int or a SymInt, `Dims` a tuple of distinct non-negative ints. A prim with an ATen overload has exactly",
        "that overload's arguments and results.",
        "",
    ]
    for family, prims in families.items():
        lines += [f"## {family} ({len(prims)})", ""]
        for prim in prims:
            lines.append(f"* `{prim.schema}`  ")
            lines.append(
                f"  {prim.doc}"
                + (f" *{', '.join(sorted(prim.tags))}*" if prim.tags else "")
                + (f" ATen: `{prim.aten}`" if prim.aten else "")
            )
        lines.append("")
    return "\n".join(lines)
