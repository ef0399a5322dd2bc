"""Workloads as values: digests, files, and what a bad file is told."""

import json

import msgspec
import pytest
import yaml
from msgspec import structs

from plexrl.sim.files import read, write
from plexrl.sim.generate import generate
from plexrl.sim.workload import Recorded, RecordedCall
from plexrl.types import BadInput, CallKind, Role


@pytest.fixture
def pair():
    return generate("pair", 3)


def refused(path, text):
    path.write_text(text)
    with pytest.raises(BadInput) as told:
        read(path)
    return str(told.value)


def test_json_round_trip(pair, tmp_path):
    write(pair, tmp_path / "w.json")
    assert read(tmp_path / "w.json") == pair
    assert read(tmp_path / "w.json").digest() == pair.digest()


def test_yaml_round_trip(pair, tmp_path):
    (tmp_path / "w.yaml").write_text(yaml.safe_dump(msgspec.to_builtins(pair)))
    assert read(tmp_path / "w.yaml") == pair


def test_a_recorded_stream_round_trips(pair, tmp_path):
    call = RecordedCall(kind=CallKind.SAMPLE, role=Role.SAMPLE, seen=0, think_us=5, service_us=7)
    job = structs.replace(pair.jobs[0], recorded=Recorded(calls=(call,), delivered=(0,)))
    workload = structs.replace(pair, jobs=(job,))
    write(workload, tmp_path / "w.json")
    assert read(tmp_path / "w.json") == workload


def test_the_digest_knows_values_and_not_number_types(pair):
    switch = structs.replace(pair.switch, gbps_in=24, gbps_out=24)
    assert structs.replace(pair, switch=switch).digest() == pair.digest()
    assert structs.replace(pair, seed=4).digest() != pair.digest()


def test_a_family_with_parameters_and_another_seed(tmp_path):
    path = tmp_path / "w.yaml"
    path.write_text("family: pair\nseed: 5\nsteps: 4\n")
    assert read(path) == generate("pair", 5, steps=4)
    assert read(path, seed=6) == generate("pair", 6, steps=4)


def test_a_seed_replaces_that_of_a_file(pair, tmp_path):
    write(pair, tmp_path / "w.json")
    assert read(tmp_path / "w.json", seed=9) == structs.replace(pair, seed=9)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda d: d["jobs"][0].update(steps=0), "$.jobs[0].steps"),
        (lambda d: d["jobs"][1]["train"].update(gpu=4), "gpu"),
        (lambda d: d["jobs"][1].pop("sample"), "sample"),
        (lambda d: d["jobs"][0]["rollout"]["lengths"].update(at_cap=2), "$.jobs[0].rollout.lengths.at_cap"),
        (lambda d: d["jobs"][1].update(job="ada-1"), "$.jobs[1].job"),
        (lambda d: d["gpus"].update(train_nodes=2), "$.gpus"),
        (lambda d: d["jobs"][0]["rollout"]["stalls"].update(turns_min=3), "$.jobs[0].rollout.stalls.turns_max"),
        (lambda d: d["jobs"][0].update(recorded={"calls": [], "delivered": [0]}), "$.jobs[0].recorded.delivered"),
    ],
)
def test_a_wrong_field_is_named_with_its_file(pair, tmp_path, change, told):
    data = json.loads(msgspec.json.encode(pair))
    change(data)
    message = refused(tmp_path / "w.json", json.dumps(data))
    assert told in message
    assert "w.json" in message


def test_jobs_of_one_base_have_equal_groups(pair, tmp_path):
    data = msgspec.to_builtins(pair)
    for job in data["jobs"]:
        job["base"] = "m"
    (tmp_path / "good.json").write_text(json.dumps(data))
    assert [job.base for job in read(tmp_path / "good.json").jobs] == ["m", "m"]
    data["jobs"][1]["train"]["gpus"] = 2
    assert "$.jobs[1].base" in refused(tmp_path / "w.json", json.dumps(data))


@pytest.mark.parametrize("text", ["{", "a: [", "", "3"])
def test_what_is_no_workload(tmp_path, text):
    assert "w.json" in refused(tmp_path / "w.json", text)


def test_a_missing_file(tmp_path):
    with pytest.raises(BadInput, match="cannot be read"):
        read(tmp_path / "none.json")


def test_where_nothing_can_be_written(pair, tmp_path):
    with pytest.raises(BadInput, match="cannot be written"):
        write(pair, tmp_path / "no" / "w.json")
