"""The census of ATen: what it counts, and that nearly nothing in scope is missing."""

from __future__ import annotations

from primtorch.__main__ import main
from primtorch.coverage import Class, Reason, census


def test_nearly_every_dense_functional_overload_is_covered() -> None:
    entries = list(census())
    inside = [e for e in entries if e.kind is not Class.OUT_OF_SCOPE]
    functional = [e for e in inside if not any(a.is_write for a in e.overload._schema.arguments)]
    for counted in (inside, functional):
        missing = [str(e.overload) for e in counted if e.kind is Class.MISSING]
        assert len(missing) <= 0.02 * len(counted), missing
    backward = [e for e in functional if e.overload._schema.name.endswith("_backward")]
    assert len(backward) > 80
    assert sum(e.kind is Class.MISSING for e in backward) <= 0.05 * len(backward)


def test_what_is_out_of_scope_has_a_reason() -> None:
    for entry in census():
        assert isinstance(entry.reason, Reason) == (entry.kind is Class.OUT_OF_SCOPE), entry


def test_the_command_prints_a_table_by_family_and_a_page(capsys) -> None:
    assert main(["coverage", "--missing"]) == 0
    text = capsys.readouterr().out
    assert "composite by dispatcher" in text and "\nupsample " in text and "\nmissing:\n" in text
    assert main(["coverage", "--html"]) == 0
    assert "<td>upsample</td>" in capsys.readouterr().out
