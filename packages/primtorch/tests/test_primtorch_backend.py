"""The example backend runs the whole set, and nets forward and backward."""

import sys
from pathlib import Path

import pytest

from primtorch.testing import check_case, parameters

EXAMPLE = Path(__file__).parents[3] / "examples" / "numpy_backend"
sys.path.insert(0, str(EXAMPLE))
backend = pytest.importorskip("backend")
run = pytest.importorskip("run")
BY_PRIM = {}
for _, _case in parameters(set(backend.DTYPES)):
    BY_PRIM.setdefault(_case.prim.name, []).append(_case)


@pytest.mark.parametrize("name", sorted(BY_PRIM))
def test_numpy_computes(name):
    for case in BY_PRIM[name]:
        check_case(backend.NumpyBackend(), case, to_backend=backend.to_numpy, from_backend=backend.to_torch)


def test_numpy_trains_a_resnet_and_a_bert(capsys):
    run.main()
    shown = capsys.readouterr().out
    assert "ResNet" in shown and "BERT" in shown and " 0 wrong; 0 of" in shown
