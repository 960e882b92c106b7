"""Every prim's meta against its reference, on the samples of `primtorch.testing`; the set is closed and versioned."""

import hashlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from primtorch.prims import PRIMS, SET_VERSION
from primtorch.spec import TensorSpec
from primtorch.symbolic import ShapeEnv, hint_of
from primtorch.testing import Report, cases, conformance

GPU_ONLY = {n for n in PRIMS if n.startswith("scaled_dot_product") and "for_cpu" not in n}
DIGESTS = {2: "486e81a30f484408", 3: "bce2e10513b1619c", 4: "e4704631ffeb2145", 5: "48c5cfc40e53216f"}


def described(argument):
    if isinstance(argument, torch.Tensor):
        return TensorSpec.of(argument)
    return tuple(map(described, argument)) if isinstance(argument, (tuple, list)) else argument


def flat(results):
    return list(results) if isinstance(results, (tuple, list)) else [results]


def is_data_dependent(size):
    return isinstance(size, torch.SymInt) and str(size).startswith("u")


def digest():
    lines = sorted(f"{p.schema} | {p.family} | {sorted(p.tags)} | {p.aten}" for p in PRIMS.values())
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def test_a_changed_set_has_a_new_version():
    assert len(PRIMS) <= 260
    assert DIGESTS.get(SET_VERSION) == digest(), "the set changed: raise SET_VERSION and note its digest here"


def test_every_prim_is_described():
    for name, prim in PRIMS.items():
        assert prim.name == name and prim.schema.startswith(f"{name}(") and prim.doc and prim.family
        assert callable(prim.meta) and callable(prim.reference)


@pytest.mark.parametrize("name", sorted(set(PRIMS) - GPU_ONLY))
def test_meta_says_what_the_reference_gives(name):
    samples = cases(name)
    assert samples
    for case in samples:
        said = flat(case.prim.meta(*map(described, case.args), **{k: described(v) for k, v in case.kwargs.items()}))
        got = flat(case.prim(*case.args, **case.kwargs))
        for spec, result in zip(said, got, strict=True):
            if not isinstance(result, torch.Tensor):
                continue
            shape = tuple(r if is_data_dependent(s) else s for s, r in zip(spec.shape, result.shape, strict=True))
            assert shape == tuple(result.shape), case
            assert spec.dtype is result.dtype, case
            if any(map(is_data_dependent, spec.shape)) or result.numel() < 2:
                continue
            strides = [(a, b) for a, b, n in zip(spec.strides, result.stride(), shape, strict=True) if n > 1]
            assert all(a == b for a, b in strides), (str(case), spec, result.stride())


TRANSFORMS = {
    "fft_r2c": lambda t, dims: (t, dims, 0, True),
    "fft_c2c": lambda t, dims: (t.to(torch.complex128), dims, 0, True),
    "fft_c2r": lambda t, dims: (t.to(torch.complex128), dims, 0, 2 * t.shape[dims[-1]] - 2),
}


@pytest.mark.parametrize("dims", [(0,), (1,), (2,), (0, 2), (2, 0), (1, 2), (0, 1, 2)], ids=str)
@pytest.mark.parametrize("name", sorted(TRANSFORMS))
def test_a_transform_of_inner_dims_is_described(name, dims):
    for layout in ((0, 1, 2), (2, 0, 1), (1, 2, 0)):
        t = torch.randn(3, 4, 5, dtype=torch.float64).permute(layout).contiguous().permute(layout)
        arguments = TRANSFORMS[name](t, list(dims))
        spec, result = PRIMS[name].meta(*map(described, arguments)), PRIMS[name](*arguments)
        assert (spec.shape, spec.strides) == (tuple(result.shape), result.stride()), layout


SYMBOLIC = {
    "add": lambda t: (t, t),
    "exp": lambda t: (t,),
    "eq": lambda t: (t, 1.0),
    "isnan": lambda t: (t,),
    "sum": lambda t: (t, (0, 2), False),
    "amax": lambda t: (t, (1,), True),
    "argmax": lambda t: (t, (2,), False),
    "var_mean": lambda t: (t, (0, 1), 1.0, True),
    "cumsum": lambda t: (t, 1),
    "permute": lambda t: (t, (2, 0, 1)),
    "expand": lambda t: (t, (4, *t.shape)),
    "unsqueeze": lambda t: (t, (1,)),
    "flip": lambda t: (t, (0,)),
    "reshape": lambda t: (t, (t.shape[0] * t.shape[1], t.shape[2])),
    "slice": lambda t: (t, 1, 0, t.shape[1] - 1, 1),
    "cat": lambda t: ((t, t), 2),
    "pad": lambda t: (t, (1, 0, 2), (0, 3, 1), 0.0),
    "roll": lambda t: (t, (1,), (0,)),
    "convert_element_type": lambda t: (t, torch.int64),
    "sort": lambda t: (t, 1, False, True),
    "bmm": lambda t: (
        t,
        TensorSpec((t.shape[0], t.shape[2], 5), (t.shape[2] * 5, 5, 1), t.dtype, t.device)
        if isinstance(t, TensorSpec)
        else torch.zeros(t.shape[0], t.shape[2], 5),
    ),
    "max_pool": lambda t: (t, (3,), (2,), (1,), (1,), False),
    "diagonal": lambda t: (t, 1, 0, 2),
    "unfold": lambda t: (t, 2, 2, 2),
    "copy_strided": lambda t: (t, (1, t.shape[0], t.shape[0] * t.shape[1])),
}


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(3, 9), min_size=3, max_size=3))
@pytest.mark.parametrize("name", sorted(SYMBOLIC))
def test_metas_take_symbolic_sizes(name, sizes):
    env = ShapeEnv()
    symbols = tuple(env.symbol(size, f"x{i}") for i, size in enumerate(sizes))
    strides = (symbols[1] * symbols[2], symbols[2], 1)
    spec = TensorSpec(symbols, strides, torch.float32, torch.device("cpu"))
    real = torch.zeros(sizes)
    said = flat(PRIMS[name].meta(*SYMBOLIC[name](spec)))
    got = flat(PRIMS[name](*SYMBOLIC[name](real)))
    for one, result in zip(said, got, strict=True):
        assert tuple(map(hint_of, one.shape)) == tuple(result.shape)
        assert tuple(map(hint_of, one.strides)) == tuple(result.stride())


class Broken:
    """Half of a backend: one right prim, one of the wrong dtype, the others missing."""

    def exp(self, t):
        return torch.exp(t)

    def eq(self, a, b):
        return torch.eq(a, b).to(torch.int64)


def test_conformance_tells_missing_from_wrong():
    report = conformance(Broken(), only=["exp", "eq", "log"])
    assert isinstance(report, Report) and not report.complete
    assert report.missing == ("log",)
    assert report.passed == len(cases("exp"))
    assert report.wrong and all(name.startswith("eq-") and "dtype" in why for name, why in report.wrong)
    assert "missing: log" in str(report)
