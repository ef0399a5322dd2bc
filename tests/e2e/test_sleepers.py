"""Engines that are ended while they sleep: the next ones adopt what they left, and nobody notices."""

import pytest

from plexrl.types import records

from .journals import applied_once, model_of, of_kind, same_training, status_of
from .localpool import LocalPool, finish
from .small import RESTLESS, device_for_one
from .test_head_killed import arm, kill_head

# Turns that end with a call: an engine is not ended while one is half done there.
SCHEDULER = RESTLESS | {"quantum": "60s"}


def end_one(pool: LocalPool, number: int) -> None:
    """The next gang to leave the GPU is said to keep more of it than was promised."""
    arm(pool, "keeps-more")
    pool.wait_until(f"engine {number} was ended", lambda: ended(pool) >= number)


def ended(pool: LocalPool) -> int:
    return sum(not record.built for record in of_kind(pool, records.Unbuilt))


@pytest.mark.timeout(900)  # four runs of programs, two heads
def test_training_goes_on_bit_for_bit_in_engines_that_are_built_again(local_pool, tiny_model, tmp_path):
    """A full-parameter model and an adapter in turns on one GPU; of both the engine is ended, and once the head too."""
    model = {"micro_batch_tokens": 128, "sample": {"replicas": 1, "kv_bytes": 1 << 18, "max_batch": 4}}
    pool = local_pool(device=device_for_one(tiny_model), model=model, scheduler=SCHEDULER)
    steps = {"full": 5, "adapter": 12}
    ranks = {"full": "0", "adapter": "8"}
    runs = {
        name: ("--rank", ranks[name], "--steps", str(n), "--rows", "8", "--lr", "1e-3") for name, n in steps.items()
    }
    alone = {name: pool.run("sft.py", *args) for name, args in runs.items()}
    here = ("--folder", str(tmp_path), "--think", "0.1")
    together = {name: pool.popen("sft.py", *args, *here, "--name", name) for name, args in runs.items()}
    pool.wait_until("both models exist", lambda: len(list(tmp_path.glob("*.ready"))) == 2)
    (tmp_path / "go").touch()
    for number in (1, 2):
        end_one(pool, number)
    # One of the two is ended at any time now; the status is written each second.
    pool.wait_until("the status tells of an ended engine", lambda: status_of(pool)["engines"]["ended"] >= 1)
    kill_head(pool)
    for name, program in together.items():
        seen = finish(program)
        same_training(pool, alone[name], seen)
        # optim_step and two forward_backward calls a step, and the save.
        assert applied_once(pool, model_of(seen["checkpoint"])) == 3 * steps[name] + 1
    told = of_kind(pool, records.Unbuilt)
    assert sum(not record.built for record in told) == sum(record.built for record in told) >= 2
    assert not [record for record in of_kind(pool, records.ModelEnded) if record.lost]
