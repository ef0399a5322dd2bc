"""plexrl simulate: what it refuses, and how it says so."""

import json

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


def test_equal_seeds_print_equal_figures_and_the_page_is_written(tmp_path):
    html = tmp_path / "pair.html"
    asked = ("simulate", "--workload", "pair:steps=2", "--policy", "all", "--seed", "3", "--json")
    one, other = plexrl(*asked, "--html", str(html)), plexrl(*asked)
    assert one.returncode == other.returncode == 0, one.stderr
    rows = [json.loads(shown.stdout)["rows"] for shown in (one, other)]
    for row in rows[0] + rows[1]:
        del row["wall_s"], row["correlation"]  # real time; and what only a kept timeline tells
    assert rows[0] == rows[1]
    assert {"isolated", "pack", "spread", "spread_backfill", "plexrl", "colocated", "llmd"} <= {
        row["policy"] for row in rows[0]
    }
    assert rows[0][0]["relative_completion"] == 1.0
    assert '<canvas id="timeline"' in html.read_text(encoding="utf-8")


def test_a_table_names_what_was_left_out():
    shown = plexrl("simulate", "--workload", "pair:steps=2", "--policy", "split_async")
    assert shown.returncode == 0, shown.stderr
    assert "split_async: workload pair" in shown.stdout


def test_a_page_that_cannot_be_written_is_one_message(tmp_path):
    assert "none/pair.html" in refused("--workload", "pair:steps=2", "--html", str(tmp_path / "none" / "pair.html"))


def test_a_configuration_gives_the_policy(tmp_path):
    config = tmp_path / "plexrl.yaml"
    model = {"path": str(tmp_path), "engine": "noop"}
    scheduler = {"placement": "isolated", "order": "fifo"}
    config.write_text(json.dumps({"state_dir": str(tmp_path), "models": {"m": model}, "scheduler": scheduler}))
    asked = ("simulate", "--workload", "pair:steps=2", "--json")
    given, isolated = plexrl(*asked, "--config", str(config)), plexrl(*asked, "--policy", "isolated")
    assert given.returncode == 0, given.stderr
    hours = [json.loads(shown.stdout)["rows"][0]["hours"] for shown in (given, isolated)]
    assert hours[0] == hours[1]


def test_a_configuration_gives_the_shares(tmp_path):
    """They reach the scheduler: the same jobs go in another order."""
    config = tmp_path / "plexrl.yaml"
    head = f"state_dir: {tmp_path}\nmodels: {{m: {{path: {tmp_path}, engine: noop}}}}\nscheduler: {{order: fair}}\n"
    asked = ("simulate", "--workload", "mixed:nodes=1,jobs=6,load=3,steps=[3, 4]")
    asked += ("--config", str(config), "--json")
    rows = []
    for shares in ("{}", "{a0: {shares: 100}, a1: {shares: 0}, a2: {shares: 0}}"):
        config.write_text(f"{head}shares: {shares}\n")
        done = plexrl(*asked)
        assert done.returncode == 0, done.stderr
        rows += json.loads(done.stdout)["rows"]
    assert all(sum(row["accounts"].values()) == pytest.approx(1) for row in rows)
    assert rows[0]["stretch_mean"] != rows[1]["stretch_mean"]
    config.write_text(f"{head}shares_from: slurm\n")
    assert "there is no Slurm in a simulation" in plexrl(*asked).stderr
