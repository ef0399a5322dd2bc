"""plexrl simulate: what it refuses, and how it says so."""

import pytest

from plexrl.cli.simulate import _parameters
from plexrl.types import BadInput
from tests.unit.cli.test_main import plexrl


def refused(*arguments: str) -> str:
    shown = plexrl("simulate", *arguments)
    assert shown.returncode == 2 and shown.stdout == ""
    assert len(shown.stderr.splitlines()) == 1, shown.stderr
    return shown.stderr


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((), "--workload"),
        (("--workload", "pair", "--preset", "paper"), "--preset"),
        (("--preset", "papers"), "'papers'"),
        (("--preset", "paper", "--seed", "1"), "--seed"),
        (("--preset", "paper", "--policy", "pack"), "--policy"),
        (("--preset", "paper", "--trace", "x"), "--trace"),
        (("--preset", "philly"), "--trace"),
        (("--workload", "pair", "--seeds", "2"), "--seeds"),
        (("--workload", "no-such"), "mixed, equal, pair"),
        (("--workload", "pair", "--policy", "best"), "'best'"),
        (("--workload", "pair:steps"), "name=value"),
        (("--workload", "pair:stepz=2"), "train_share, steps"),
        (("--workload", "pair", "--config", "absent.yaml"), "absent.yaml"),
        (("--workload", "pair", "--policy", "pack", "--config", "absent.yaml"), "--config"),
    ],
)
def test_wrong_options_are_one_message(arguments, named):
    assert named in refused(*arguments)


def test_parameters_of_a_family():
    given = _parameters("nodes=8,lag=0.5,train_share=[0.1, 0.2],size=7B,sizes={7B: 1, 0.5B: 2}")
    assert given == {
        "nodes": 8,
        "lag": 0.5,
        "train_share": [0.1, 0.2],
        "size": "7B",
        "sizes": {"7B": 1, "0.5B": 2},
    }
    with pytest.raises(BadInput, match="jobs"):
        _parameters("jobs=[1")
