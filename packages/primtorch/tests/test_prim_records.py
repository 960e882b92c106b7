"""Records as text: what is read is what was written, and nothing else is read."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from primtorch.records import NotARecord, NotAsText, Records
from primtorch.spec import TensorSpec


class Kind(enum.Enum):
    FIRST = "first"


@dataclass(frozen=True)
class Record:
    name: str
    held: object = ()


class Stranger:
    pass


RECORDS = Records((Record, Kind))
SPEC = TensorSpec((2, 3), (3, 1), torch.float32, torch.device("cpu"))


@pytest.mark.parametrize(
    "value",
    [
        None, True, 3, -0.0, 0.1, float("inf"), "a\n\"b", (), (1, (2.0, [None])), [1, {"a": (2,)}], frozenset({1, 2}),
        torch.bfloat16, torch.strided, torch.channels_last, torch.device("cuda:1"), torch.ops.aten.add.Tensor,
        torch.ops.aten.relu.default, Kind.FIRST, Record("r", (Record("s"), Kind.FIRST)), SPEC, {"tuple": 1}, {1: {}},
    ],
    ids=repr,
)  # fmt: skip
def test_read_is_written(value: Any) -> None:
    read = RECORDS.value(RECORDS.text(value))
    assert read == value and type(read) is type(value) and repr(read) == repr(value)


@pytest.mark.parametrize(
    "value",
    [
        Stranger(),
        Record("r", Stranger()),
        torch.zeros(2),
        float("nan"),
        lambda: 1,
        torch.ops.prims.sin.default,
        1j,
        print,
    ],
    ids=["object", "record of an object", "tensor", "nan", "function", "operator", "complex", "builtin"],
)
def test_what_has_no_form(value: object) -> None:
    with pytest.raises(NotAsText):
        RECORDS.text(value)


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "{}", '{"record":["Stranger"]}', '{"record":["Record",1,2,3]}', '{"operator":"os.system.default"}',
        '{"operator":"aten.no_such.default"}', '{"operator":"prims.sin.default"}', '{"dtype":"nn"}', '{"call":[]}',
        '{"member":["Kind","SECOND"]}', '{"device":"nowhere"}', '{"float":"x"}', '{"dict":[[[],1]]}', "[" * 10**5,
    ],
    ids=lambda text: text[:40],
)  # fmt: skip
def test_what_is_no_record(text: str) -> None:
    with pytest.raises(NotARecord):
        RECORDS.value(text)
