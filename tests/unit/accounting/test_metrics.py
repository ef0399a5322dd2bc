"""What Prometheus is told, and that the site's files ask for nothing else."""

import json
import re
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from typer.testing import CliRunner

from plexrl.accounting.metrics import Pool, render
from plexrl.accounting.published import compute
from plexrl.cli.main import app
from plexrl.types import SpanClass

SITE = Path(__file__).parents[3] / "site_config"
STATUS = {
    "now_us": 5_000_000,
    "gpus": {"n1:0": {"phase": "open"}, "n1:1": {"phase": "build"}, "n2:0": {"phase": ""}},
    "jobs": {"11.0": {"account": "ml", "open_calls": 3}, "12.0": {"account": "ml", "open_calls": 4}},
    "tiers": {"n1": {"host_bytes": 100, "promised_bytes": 40, "spilled": {"a": 7, "b": 8}}},
    "links": {"n1": {"gbps_in": 2.0, "gbps_out": 1.0, "gbps_refill": 0.0, "gbps_spill": 0.0}},
}


@pytest.fixture
def told(scene):
    published = compute(scene.records, scene.intervals(96), scene.us(100), 1000, True)
    text = render([Pool(name="lab", state="ready", status=STATUS, published=published), Pool(name="b", state="down")])
    return _samples(text)


def _samples(text: bytes) -> dict[tuple, float]:
    found = {}
    for family in text_string_to_metric_families(text.decode()):
        assert family.documentation
        for sample in family.samples:
            assert (key := (sample.name, frozenset(sample.labels.items()))) not in found
            found[key] = sample.value
    return found


def value(told, name, **labels):
    return told[f"plexrl_{name}", frozenset(labels.items())]


def test_what_is_now_and_what_was(told):
    assert value(told, "pool_up", pool="lab") == 1 and value(told, "pool_up", pool="b") == 0
    assert value(told, "gpus", pool="lab", doing="switching") == 1
    assert value(told, "calls_open", pool="lab", account="ml") == 7
    assert value(told, "spilled_bytes", pool="lab", node="n1") == 15
    assert value(told, "link_bytes_per_second", pool="lab", node="n1", way="in") == 2e9
    assert value(told, "switches_total", pool="lab") == 6
    assert value(told, "busy_ratio", pool="lab") == pytest.approx(128 / 192)
    who = {"pool": "lab", "user": "ada", "account": "ml", "qos": "", "partition": ""}
    assert value(told, "charged_gpu_seconds_total", **who) == 80


def test_classes_and_unattributed_add_up_to_what_was_held(told):
    held = value(told, "held_gpu_seconds_total", pool="lab")
    classes = [value(told, "class_gpu_seconds_total", **{"pool": "lab", "class": kind.value}) for kind in SpanClass]
    lost = value(told, "class_gpu_seconds_total", **{"pool": "lab", "class": "unattributed"})
    charged = sum(amount for (name, _), amount in told.items() if name == "plexrl_charged_gpu_seconds_total")
    assert sum(classes) + lost == held == charged + value(told, "overhead_gpu_seconds_total", pool="lab") + lost


def _asked(text: str) -> set[str]:
    return set(re.findall(r"plexrl_[a-z_0-9]+", text))


def test_every_query_names_a_metric_that_exists_with_labels_that_it_has(told):
    names = {name for name, _ in told}
    labels = {name: {label for key, _ in told if key == name for label in dict(_)} for name in names}
    board = json.loads((SITE / "grafana.json").read_text())
    queries = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    queries += [each["query"]["query"] for each in board["templating"]["list"] if isinstance(each["query"], dict)]
    rules = yaml.safe_load((SITE / "prometheus.rules.yml").read_text())["groups"][0]["rules"]
    queries += [rule["expr"] for rule in rules]
    for query in queries:
        assert _asked(query) and _asked(query) <= names, query
        for by in re.findall(r"by \(([^)]*)\)", query):
            for name in _asked(query):
                assert {label.strip() for label in by.split(",")} <= labels[name], query
    scrape = yaml.safe_load((SITE / "prometheus.yml.fragment").read_text())
    assert scrape["scrape_configs"][0]["params"] == {"collect[]": ["textfile"]}
    assert scrape["rule_files"] == ["prometheus.rules.yml"]
    panels = [panel["gridPos"] for panel in board["panels"]]
    cells = [(x, y) for p in panels for x in range(p["x"], p["x"] + p["w"]) for y in range(p["y"], p["y"] + p["h"])]
    assert len(cells) == len(set(cells)) and max(x for x, _ in cells) < 24  # panels do not lie over one another


def test_a_pool_without_anything_is_told_too():
    assert b'plexrl_pool_up{pool="new"} 0.0' in render([Pool(name="new", state="down")])


def test_the_command_replaces_its_file(registry, tmp_path, monkeypatch):
    monkeypatch.setenv("PLEXRL_REGISTRY", str(registry))
    path = tmp_path / "plexrl.prom"
    path.write_text("old")
    done = CliRunner().invoke(app, ["metrics", "--textfile", str(path)])
    assert done.exit_code == 0, done.output
    found = _samples(path.read_bytes())
    assert value(found, "pool_up", pool="lab") == 0
    assert value(found, "held_gpu_seconds_total", pool="lab") > 0
    assert path.stat().st_mode & 0o777 == 0o644 and list(tmp_path.glob(".plexrl*")) == []
    assert CliRunner().invoke(app, ["metrics", "--textfile", "/no/such/folder/x"]).exit_code != 0
