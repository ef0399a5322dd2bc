"""Training on given data has the same bits alone and time-sliced: losses, logprobs, weights, optimizer."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from plexrl.engines import noop, sizing
from plexrl.types import CallKind, records

from .journals import checkpoint_files, model_of
from .localpool import LocalPool, finish
from .small import LORA_RANK, RESTLESS, device_for_one

MIB = 1 << 20
STEPS = 8
SWITCHES = 5
FULL_SFT = ("--rank", "0", "--seed", "1", "--lr", "1e-3")
LORA_SFT = ("--rank", str(LORA_RANK), "--seed", "2")
LORA_RL = ("--rank", str(LORA_RANK), "--seed", "3", "--loss", "importance_sampling")


@dataclass
class Ran:
    """What is to be the same, and how often the job's own worker group was brought in between first and last step."""

    losses: list
    logprobs: list
    files: dict[str, bytes]
    switches: int


def ran(pool: LocalPool, printed: dict) -> Ran:
    """The result of a program that has ended."""
    model = model_of(printed["checkpoint"])
    journal = pool.records()
    (group,) = (r.group for r in journal if isinstance(r, records.ModelCreated) and r.model == model)
    mine = [r.call.id for r in journal if isinstance(r, records.CallAccepted) and r.call.deployment == model]
    steps = [
        r.call.id
        for r in journal
        if isinstance(r, records.CallAccepted) and r.call.id in mine and r.call.kind is CallKind.OPTIM_STEP
    ]
    ends = {r.id: r for r in journal if isinstance(r, records.CallEnded)}
    assert len(steps) == STEPS and all(ends[call].ok for call in mine)
    first, last = ends[steps[0]].now_us, ends[steps[-1]].now_us
    switches = [
        r
        for r in journal
        if isinstance(r, records.Switched)
        and r.gang == f"{group}/0"
        and r.gpu == "local:0"
        and r.incoming
        and r.moved.bytes_in
        and first < r.now_us < last
    ]
    return Ran(printed["losses"], printed["logprobs"], checkpoint_files(pool, printed["checkpoint"]), len(switches))


def same_bits(pool: LocalPool, folder: Path, *jobs: tuple[str, ...]) -> list[Ran]:
    """Run each job alone, then all at once; compare. Returns the latter."""
    common = ("--steps", str(STEPS), "--rows", "16")
    alone = [ran(pool, pool.run("sft.py", *job, *common)) for job in jobs]
    here = ("--folder", str(folder), "--think", "0.05")
    together = [pool.popen("sft.py", *job, *common, *here, "--name", str(i)) for i, job in enumerate(jobs)]
    pool.wait_until("all models exist", lambda: len(list(folder.glob("*.ready"))) == len(jobs))
    (folder / "go").touch()
    sliced = [ran(pool, finish(process)) for process in together]
    for one, other in zip(alone, sliced, strict=True):
        assert one.losses == other.losses
        assert one.logprobs == other.logprobs
        assert one.files.keys() == other.files.keys()
        assert all(one.files[name] == other.files[name] for name in one.files)
        assert one.losses[0] != one.losses[-1]
    return sliced


@pytest.mark.parametrize("gpus", [1, 2], ids=["one-gpu", "gang-of-2"])
def test_full_and_lora_time_sliced(local_pool, tiny_model, tmp_path, gpus):
    model = {"micro_batch_tokens": 128, "sample": {"replicas": 1, "kv_bytes": MIB // 4, "max_batch": 4}}
    pool = local_pool(gpus=gpus, device=device_for_one(tiny_model), model=model, scheduler=RESTLESS)
    jobs = (FULL_SFT, LORA_SFT) if gpus == 1 else (FULL_SFT, LORA_RL)
    for job in same_bits(pool, tmp_path, *jobs):
        assert job.switches >= SWITCHES, pool.logs()


def test_recorded_rl_and_an_adapter_switch_moves_the_adapter_only(local_pool, tiny_model, tmp_path):
    pool = local_pool(scheduler=RESTLESS)
    same_bits(pool, tmp_path, LORA_RL, LORA_SFT)
    journal = pool.records()
    (group,) = {r.spec.group for r in journal if isinstance(r, records.GroupPlaced)}
    assert group.startswith("tiny.lora.train")
    assert not [r for r in journal if isinstance(r, records.Switched) and r.moved.bytes_in]
    moved = [r.moved_bytes for r in journal if isinstance(r, records.CallEnded) and r.moved_bytes]
    assert len(moved) >= 2 * SWITCHES
    adapter = sizing.state_bytes(str(tiny_model), "float32", "lora", LORA_RANK, True, True, True)
    assert max(moved) <= 2 * adapter  # one out, one in
    assert adapter != noop.BYTES
