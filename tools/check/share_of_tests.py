"""A run of some cases of each test: `pytest --share N` takes one in N of those of a test function that has many.

Which ones is drawn for each run, from a seed that a run that fails tells and `--share-seed` takes back; over several
runs all are taken. Test functions with few cases run them all, and at least one runs of each.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import pytest

FEW = 4  # cases; where a test has fewer, none is left out


def chosen(cases: Iterable[str], share: int, seed: int) -> set[str]:
    """Of test ids (`file::function[parameters]`) those of one run: of a function's cases, where it has `FEW` or more,
    one in `share`, rounded up."""
    functions: dict[str, list[str]] = defaultdict(list)
    for case in cases:
        functions[case.partition("[")[0]].append(case)
    taken: set[str] = set()
    for function, own in functions.items():
        count = len(own) if len(own) < FEW else math.ceil(len(own) / share)
        taken.update(random.Random(f"{seed} {function}").sample(sorted(own), count))
    return taken


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("share")
    group.addoption("--share", type=int, default=1, metavar="N", help="run one in N cases of tests with many cases")
    group.addoption("--share-seed", type=int, metavar="SEED", help="by which they are drawn; default: another each run")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    if config.option.share_seed is None:
        drawn = getattr(config, "workerinput", {}).get("share_seed")
        config.option.share_seed = random.SystemRandom().randrange(2**32) if drawn is None else drawn


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Processes of one run have one seed."""
    node.workerinput["share_seed"] = node.config.option.share_seed


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.option.share > 1:
        taken = chosen((item.nodeid for item in items), config.option.share, config.option.share_seed)
        left = [item for item in items if item.nodeid not in taken]
        items[:] = [item for item in items if item.nodeid in taken]
        config.hook.pytest_deselected(items=left)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if config.option.share > 1:
        drawn = f"--share {config.option.share} --share-seed {config.option.share_seed}"
        terminalreporter.write_line(f"one in {config.option.share} cases of tests with many; the same again: {drawn}")
