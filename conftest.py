"""For the tests of all packages: none depends on how fast the machine is, and none changes what others see."""

import gc
import sys
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from primtorch import ambient

pytest_plugins = ["share_of_tests"]  # tools/check

settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


@pytest.fixture(autouse=True, scope="session")
def no_search_for_a_test_case() -> Iterator[None]:
    """At each of its samples and errors torch's operator database looks for a `unittest.TestCase` on the stack, and for
    the source of every frame there: most of the time of the tests that read it, and these have none."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("torch.testing._internal.common_utils", "torch.testing._internal.opinfo.core"):
            if name in sys.modules:
                patch.setattr(sys.modules[name], "extract_test_fn", lambda: None, raising=False)
        yield


@pytest.fixture(autouse=True)
def ambient_state_kept() -> Iterator[None]:
    """Every test leaves the state of its thread and of the process as it found it, by itself or by what it tests: what
    it left would show in another test of the same process, if anywhere."""
    before = ambient.snapshot()
    yield
    changed = ambient.changed(before)
    ambient.restore(before)
    if changed:
        told = (f"{name}: {then!r} before, {now!r} behind" for name, (then, now) in changed.items())
        pytest.fail("the test left ambient state changed:\n" + "\n".join(told), pytrace=False)


@pytest.fixture(scope="module")
def collector_of_new_objects() -> Iterator[None]:
    """For tests that have garbage collected, or look through all objects: what there is by then, in a process that has
    run many tests millions of objects, is left out."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
