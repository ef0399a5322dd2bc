"""sbatch_templates/eval.sbatch on a real Slurm and a real pool, submitted as its user would."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.site import POOL, Site

pytestmark = pytest.mark.timeout(500)


@pytest.fixture
def pool(cluster, tiny_model) -> Iterator[Site]:
    site = Site(cluster, tiny_model)
    site.plexrl("pool", "declare", POOL, "--config", str(site.config), "--fresh")
    site.start()
    yield site
    site.stop()


def test_an_evaluation_through_the_openai_api(pool: Site):
    templates = pool.cluster.opt / "venv" / "share" / "plexrl" / "sbatch_templates"
    home = Path(pool.cluster.as_user("alice")["cwd"])
    out = home / "answers.jsonl"
    options = ["--model", "tiny", "--problems", "12", "--max-tokens", "8", "--out", str(out)]
    submitted = pool.cluster.run(
        "alice",
        ["sbatch", "--parsable", f"--plexrl-pool={POOL}", str(templates / "eval.sbatch"), *options],
        env={"PYTHON": str(pool.python), "PROGRAMS": str(templates)},
    )
    job = int(submitted.stdout)
    said = home / f"eval-{job}.out"
    pool.wait_until(
        "the job ends", lambda: pool.state_of(job) not in ("PENDING", "RUNNING", "COMPLETING", "UNKNOWN"), 150
    )
    text = said.read_text() if said.exists() else ""
    assert pool.state_of(job) == "COMPLETED", text + pool.pool_output()
    assert "tiny: " in text and " of 12 right, " in text
    answers = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(answers) == 12 and all(0 < answer["tokens"] <= 8 and answer["logprob"] < 0 for answer in answers)
    assert pool.cluster.slurm().sacct([job])[-1].gpus == 0
