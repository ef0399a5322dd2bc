"""What the demo writes for its pool, and what it demands of its own figures."""

import copy

import pytest

from plexrl.cli.demo import CONFIG, JOBS, MODEL, shortfalls
from plexrl.config import load
from plexrl.config.engines import missing
from plexrl.types import Role

GOOD = {
    "jobs": [
        {"user": "alice", "reward_first5": 0.35, "reward_last5": 0.98},
        {"user": "bob", "reward_first5": 0.46, "reward_last5": 0.91},
    ],
    "gpus_that_served_both": ["n1:0", "n2:0"],
    "switches": 182,
    "switched_bytes": 200e9,
    "smaller_trainer_bytes": 6e8,
    "stall_overlap": 0.58,
    "report": {"gpus": 2, "charged_gpu_seconds": 595.0, "overhead_gpu_seconds": 190.5, "sacct_gpu_seconds": 788.0},
}


@pytest.mark.parametrize(
    ("placement", "gpus", "engine", "trainer"),
    [("pack", 2, "torch", "torch"), ("isolated", 1, "torch", "torch"), ("pack", 2, "vllm", "deepspeed")],
)
def test_its_configuration_is_valid(tmp_path, tiny_model, placement, gpus, engine, trainer):
    path = tmp_path / "demo.yaml"
    where = {"state": tmp_path / "state", "path": tiny_model, "munge": tmp_path / "munge.socket"}
    engines = {"engine": engine, "trainer": trainer}
    path.write_text(CONFIG.format(what="a test", model=MODEL, gpus=gpus, placement=placement, **engines, **where))
    if any(engine != "torch" and missing(engine, "cpu") for engine in (engine, trainer)):
        pytest.skip("an extra is not installed here")
    config = load(path)
    assert [config.models[MODEL].engine_of(role) for role in Role] == [trainer, engine]
    assert config.models[MODEL].train.gpus == gpus
    assert config.scheduler.placement == placement
    assert (config.device.core("n1", 0), config.device.core("n2", 0)) == (0, 1)


def test_the_second_job_waits_for_a_tool_and_the_first_does_not():
    assert [("--tool-seconds" in job.options) for job in JOBS] == [False, True]


def test_a_good_run_lacks_nothing():
    assert shortfalls(GOOD, sharing=True) == []


@pytest.mark.parametrize(
    ("path", "value", "told"),
    [
        (("jobs", 1, "reward_last5"), 0.6, "bob's last five steps"),
        (("report", "sacct_gpu_seconds"), 792.0, "differ from sacct by 6.5"),
        (("report", "sacct_gpu_seconds"), None, "sacct told nothing"),
        (("gpus_that_served_both",), ["n1:0"], "not every GPU"),
        (("switches",), 9, "too little was switched"),
        (("switched_bytes",), 5e9, "too little was switched"),
        (("stall_overlap",), 0.1, "waiting was not filled"),
    ],
)
def test_each_shortfall_is_told(path, value, told):
    found = copy.deepcopy(GOOD)
    *way, last = path
    inner = found
    for key in way:
        inner = inner[key]
    inner[last] = value
    (missing,) = shortfalls(found, sharing=True)
    assert told in missing
    apart = shortfalls(found, sharing=False)
    assert bool(apart) == (path[0] in ("jobs", "report"))
