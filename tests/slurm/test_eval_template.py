"""sbatch_templates/eval.sbatch on a real Slurm and a real pool, and what its user sees of it."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.site import POOL, Site

pytestmark = pytest.mark.timeout(500)


@pytest.fixture
def site(cluster, tiny_model) -> Iterator[Site]:
    site = Site(cluster, tiny_model)
    site.plexrl("pool", "declare", POOL, "--config", str(site.config), "--fresh")
    yield site
    if (cluster.registry / f"{POOL}.live.json").exists():
        site.stop()


def jobs(site: Site, user: str) -> dict[str, dict]:
    """What `plexrl jobs` shows a user, by number."""
    rows = json.loads(site.plexrl("jobs", "--json", user=user).stdout)
    return {row["job"].partition(".")[0]: row for row in rows}


def test_an_evaluation_waits_runs_and_is_shown_to_its_user(site: Site):
    templates = site.cluster.opt / "venv" / "share" / "plexrl" / "sbatch_templates"
    home = Path(site.cluster.as_user("alice")["cwd"])
    out = home / "answers.jsonl"
    options = ["--model", "tiny", "--problems", "12", "--max-tokens", "8", "--out", str(out)]
    submitted = site.cluster.run(
        "alice",
        ["sbatch", "--parsable", f"--plexrl-pool={POOL}", str(templates / "eval.sbatch"), *options],
        env={"PYTHON": str(site.python), "PROGRAMS": str(templates)},
    )
    job = int(submitted.stdout)
    site.wait_until("it waits for the licence", lambda: site.cluster.slurm().job(job).reason == "Licenses", 30)
    shown = jobs(site, "alice")[str(job)]
    assert (shown["pool"], shown["state"], shown["open_calls"]) == (POOL, "PENDING", None)
    assert shown["why"] == f"Pool {POOL} is down; the job starts when it is up."
    assert str(job) not in jobs(site, "bob")

    site.start()
    said = home / f"eval-{job}.out"
    running = ("PENDING", "RUNNING", "COMPLETING", "UNKNOWN")
    site.wait_until("the job ends", lambda: site.state_of(job) not in running, 200)
    text = said.read_text() if said.exists() else ""
    assert site.state_of(job) == "COMPLETED", text + site.pool_output()
    assert "tiny: " in text and " of 12 right, " in text
    answers = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(answers) == 12 and all(0 < answer["tokens"] <= 8 and answer["logprob"] < 0 for answer in answers)
    assert site.cluster.slurm().sacct([job])[-1].gpus == 0

    options = ["--parsable", f"--plexrl-pool={POOL}", "--output=%j.out", "--wrap=sleep 300"]
    long = int(site.cluster.run("alice", ["sbatch", *options]).stdout)
    site.wait_until("it is attached", lambda: jobs(site, "root").get(str(long), {}).get("state") == "ATTACHED")
    refused = site.plexrl("cancel", str(long), user="bob", check=False)
    assert refused.returncode == 2 and f"you see no job {long}" in refused.stderr  # PrivateData hides it
    assert site.plexrl("cancel", "999999", user="alice", check=False).returncode == 2
    site.plexrl("cancel", str(long), user="alice")
    site.wait_until("it is cancelled", lambda: site.state_of(long).startswith("CANCELLED"))
