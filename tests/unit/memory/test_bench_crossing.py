"""bench.crossing hands bytes over in both ways and ends what it started."""

import json

import psutil

from bench.crossing import WAYS, measure
from plexrl.memory.transfer import CHUNK


def test_both_ways_are_measured_beside_the_same_reference():
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    descriptors = psutil.Process().num_fds()
    figures = measure(2 * CHUNK, 4, lambda line: None)
    assert [row["way"] for row in figures["rows"]] == list(WAYS)
    assert all(row["seconds"] > 0 and row["cpu_seconds"] > 0 for row in figures["rows"])
    assert figures["share"]["alone"] == 1.0 and figures["share"].keys() == set(WAYS)
    assert json.loads(json.dumps(figures)) == figures
    assert {child.pid for child in psutil.Process().children(recursive=True)} == before
    assert psutil.Process().num_fds() == descriptors
