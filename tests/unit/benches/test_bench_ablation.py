"""bench.ablation: every mechanism has its case, and a case runs twice."""

import pytest

from bench.ablation import cases, measure


def test_every_mechanism_has_a_case_that_changes_one_thing():
    found = cases()
    assert [case.mechanism for case in found] == [
        "lazy offload",
        "prefetch",
        "HRRS",
        "anticipation",
        "minimum turn",
        "backfill",
        "long-tail gathering",
        "shared base",
        "natural ends",
    ]
    for case in found:
        changed = (case.on[0] != case.off[0]) + (case.on[1] != case.off[1])
        assert changed == 1, case.mechanism


# "minimum turn": with quanta of a second two samplers once read their prefixes again and again, and nothing ever ended.
@pytest.mark.parametrize("mechanism", ["prefetch", "minimum turn", "shared base"])
def test_a_case_says_what_its_mechanism_is_worth(mechanism):
    row = measure(next(case for case in cases() if case.mechanism == mechanism))
    assert row["worth"] == row["without"] / row["with"] > 1
