"""Every program of the other files with a graph break before each statement: the same results, the same effects."""

from __future__ import annotations

import pytest
import test_dynamo_world_classes as classes
import test_dynamo_world_containers as containers
import test_dynamo_world_library as library
import test_dynamo_world_mixtures as mixtures
import test_dynamo_world_operators as operators
import test_dynamo_world_protocols as protocols
import test_dynamo_world_records as records
import test_dynamo_world_reflection as reflection
import test_dynamo_world_torch as questions
import test_dynamo_world_values as values
from world_cases import Case, cases_of, check_with_breaks

MODULES = (classes, containers, library, mixtures, operators, protocols, records, reflection, questions, values)


@pytest.mark.parametrize("found", [found for module in MODULES for found in cases_of(module.__name__)])
@pytest.mark.filterwarnings("ignore")
def test_with_breaks(found: Case) -> None:
    check_with_breaks(found)
