"""The tables of faults agree with the code; `make test-faults` sows the faults."""

from collections import Counter

import pytest
from sow import Fault, read_faults

FAULTS = read_faults()


def test_every_fault_can_be_sown():
    assert {fault.name: problem for fault in FAULTS if (problem := fault.problem())} == {}


def test_names_are_unique_and_faults_change_something():
    assert [name for name, count in Counter(fault.name for fault in FAULTS).items() if count > 1] == []
    assert [fault.name for fault in FAULTS if fault.old == fault.new or not fault.tests] == []


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"file": "ops/gone.py"}, "src/quatrain/ops/gone.py is gone"),
        ({"old": "no such text"}, "its text occurs 0 times in src/quatrain/ops/kl.py, not once"),
        ({"old": "def "}, "times in src/quatrain/ops/kl.py, not once"),
        ({"tests": ("ops/test_gone.py",)}, "tests/ops/test_gone.py is gone"),
        ({"tests": ("ops/test_kl.py::test_gone",)}, "tests/ops/test_kl.py::test_gone is gone"),
    ],
)
def test_a_fault_that_cannot_be_sown_says_why(change, problem):
    fault = Fault("name", "why", "ops/kl.py", "def k1(", "def k4(", ("ops/test_kl.py",))
    assert fault.problem() is None
    assert problem in fault._replace(**change).problem()
