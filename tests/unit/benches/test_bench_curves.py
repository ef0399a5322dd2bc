"""bench.curves: the pictures of docs/scheduler.md say what the text beside them says."""

from pathlib import Path
from xml.etree import ElementTree

import pytest

from bench.curves import NAMESPACE, PICTURES, quantum, quantum_rows, score, score_rows, sharing, sharing_rows

ROOT = Path(__file__).parents[3]


def test_a_gang_that_needs_a_switch_goes_first_only_after_waiting_longer():
    rows = score_rows()
    assert rows[0]["resident"] == rows[0]["switch"] == 1
    for row in rows[1:]:
        assert 1 < row["switch"] < row["resident"]
        assert row["overtakes_s"] > row["wait_s"]
        assert row["heavy_user"] == row["resident"] / 8
    fresh, waited = rows[0]["resident"], next(row for row in rows if row["wait_s"] == 30)["switch"]
    assert waited > fresh
    parse(score(rows), curves=3)


def test_jobs_with_long_checks_fill_each_others_gaps():
    rows = sharing_rows(most=3, steps=3)
    duty = [row["checked_duty"] for row in rows]
    assert duty == sorted(duty) and duty[2] > 1.2 * duty[0]
    assert rows[0]["checked_stretch"] < rows[2]["checked_stretch"] < rows[2]["stretch"]
    parse(sharing(rows), curves=4)


def test_longer_turns_switch_less():
    rows = quantum_rows((5, 120), steps=4)
    assert rows[0]["switches_per_hour"] > rows[1]["switches_per_hour"] > 0
    parse(quantum(rows), curves=2)
    assert quantum_rows((5,), steps=4) == rows[:1]


@pytest.mark.parametrize("name", PICTURES)
def test_the_document_shows_the_picture(name):
    parse((ROOT / "docs" / "img" / f"{name}.svg").read_text(encoding="utf-8"))
    assert f"](img/{name}.svg)" in (ROOT / "docs" / "scheduler.md").read_text(encoding="utf-8")


def parse(svg: str, curves: int | None = None) -> None:
    """It is an SVG file with so many curves."""
    root = ElementTree.fromstring(svg)
    assert root.tag == f"{{{NAMESPACE}}}svg"
    found = len(root.findall(f".//{{{NAMESPACE}}}polyline"))
    assert found == curves if curves else found
