"""Host memory too small for all deployments: they take turns on NVMe too, and their bits are the same."""

from pathlib import Path

import pytest

from plexrl.engines import sizing
from plexrl.types import Role, records

from .journals import applied_once, model_of, of_kind, same_training, status_of
from .localpool import LocalPool, finish
from .small import RESTLESS, device_for_one

MIB = 1 << 20
MODEL = {"micro_batch_tokens": 128, "sample": {"replicas": 1, "kv_bytes": MIB // 4, "max_batch": 4}}


def host_for(model: Path, states: float) -> int:
    """Bytes of a node's memory in which the base and so many full-parameter states fit."""
    base = sizing.sizes(str(model), "float32", Role.TRAIN, "full", 1, 8, 0).base_bytes
    state = sizing.state_bytes(str(model), "float32", "full", None, True, True, True)
    return -(-(base + int(states * state) + MIB // 4) // 4096) * 4096


def files_of(nvme: Path) -> list[Path]:
    """What is spilled now."""
    return [path for path in nvme.rglob("*") if path.is_file() and path.stat().st_size > 64 << 10]


def short_of_memory(local_pool, tiny_model: Path, nvme: Path, states: float) -> LocalPool:
    return local_pool(
        device=device_for_one(tiny_model),
        model=MODEL,
        scheduler=RESTLESS,
        host={"bytes": host_for(tiny_model, states)},
        nvme={"path": str(nvme), "bytes": 64 * MIB},
    )


def test_states_spill_and_come_back_bit_for_bit(local_pool, tiny_model, tmp_path):
    """Room for one state and a half: every switch between the two brings one from NVMe and sends the other there."""
    nvme = tmp_path / "nvme"
    pool = short_of_memory(local_pool, tiny_model, nvme, 1.5)
    common = ("--rank", "0", "--steps", "4", "--rows", "8", "--lr", "1e-3")
    alone = pool.run("sft.py", *common)
    assert not files_of(nvme)
    names = ("a", "b")
    together = [pool.popen("sft.py", *common, "--folder", str(tmp_path), "--name", name) for name in names]
    pool.wait_until("all models exist", lambda: len(list(tmp_path.glob("*.ready"))) == len(names))
    assert files_of(nvme)
    pool.wait_until("its status says so", lambda: status_of(pool)["tiers"]["local"]["spilled"])
    assert sum(status_of(pool)["tiers"]["local"]["spilled"].values()) > 0
    (tmp_path / "go").touch()
    for program in together:
        same_training(pool, alone, finish(program))
    link = status_of(pool)["links"]["local"]
    assert link["gbps_refill"] > 0 and link["gbps_spill"] > 0
    pool.wait_until("nothing is left on NVMe", lambda: not files_of(nvme))


@pytest.mark.parametrize("beyond", [True, False], ids=["a-step-beyond", "as-saved"])
def test_a_damaged_file_costs_what_came_after_the_checkpoint(local_pool, tiny_model, tmp_path, beyond):
    """One deployment, and it alone, is lost; as it was saved, it is restored, and nobody notices."""
    nvme = tmp_path / "nvme"
    pool = short_of_memory(local_pool, tiny_model, nvme, 1.5)
    undisturbed = pool.run("survivor.py", "--rank", "0")
    more = ["--beyond"] if beyond else []
    doomed = pool.popen("survivor.py", "--rank", "0", "--hit", str(tmp_path), "--wait", *more)
    pool.wait_until("it has saved", (tmp_path / "hit.saved").exists)
    (tmp_path / "go").touch()
    other = pool.popen(
        "sft.py", "--rank", "0", "--folder", str(tmp_path), "--steps", "12", "--lr", "1e-3", "--think", "0.05"
    )
    pool.wait_until("the other trains, and the first is on NVMe", (tmp_path / "job.steps").exists)
    pool.wait_until("what was refilled is removed", lambda: len(files_of(nvme)) == 1)
    (file,) = files_of(nvme)
    with file.open("r+b") as damaged:
        damaged.seek(file.stat().st_size // 2)
        piece = damaged.read(16)
        damaged.seek(-16, 1)
        damaged.write(bytes(255 - byte for byte in piece))
    (tmp_path / "hit.go").touch()
    # Only when the other is over there is room for what goes on from the checkpoint.
    assert applied_once(pool, model_of(finish(other)["checkpoint"])) == 3 * 12 + 1
    (tmp_path / "hit.on").touch()
    seen = finish(doomed)
    assert seen["after"] == undisturbed["after"]
    lost = {r.model for r in of_kind(pool, records.ModelEnded) if r.lost}
    pool.wait_until("its status says so", lambda: status_of(pool)["engines"]["deployments_restored"] == (not beyond))
    if not beyond:
        assert seen["errors"] == [] and not lost
        return
    assert len(seen["errors"]) == 2
    assert all(f"last checkpoint is {seen['kept']}" in error for error in seen["errors"]), seen["errors"]
    assert file.name in seen["errors"][0] and lost == {model_of(seen["kept"])}
