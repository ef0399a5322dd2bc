"""What the tests ask a pool's journal."""

import json

from plexrl.types import records

from .localpool import LocalPool


def of_kind(pool: LocalPool, kind: type) -> list:
    """Records of one type."""
    return [record for record in pool.records() if isinstance(record, kind)]


def status_of(pool: LocalPool) -> dict:
    """What the head said of itself within the last second or so."""
    return json.loads((pool.state / "run" / "status.json").read_text())


def model_of(checkpoint: str) -> str:
    """The model that a `tinker://<model>/...` path is of."""
    return checkpoint.removeprefix("tinker://").split("/")[0]


def applied_once(pool: LocalPool, model: str) -> int:
    """Holds that each call of a model was accepted once and ended well once, by the model's own account in order.

    Returns how many there were.
    """
    journal = pool.records()
    accepted = [r.call.seq for r in journal if isinstance(r, records.CallAccepted) and r.call.deployment == model]
    ended = [
        r
        for r in journal
        if isinstance(r, records.CallEnded) and r.id.rpartition(":")[0] == model and not r.id.endswith(":0")
    ]
    assert sorted(accepted) == list(range(1, len(accepted) + 1))
    assert [int(r.id.rpartition(":")[2]) for r in ended] == list(range(1, len(accepted) + 1))
    assert all(r.ok for r in ended), [r.error for r in ended]
    return len(accepted)


def checkpoint_files(pool: LocalPool, path: str) -> dict[str, bytes]:
    """The tensors of a saved state, as files: weights and optimizer."""
    model, kind, name = path.removeprefix("tinker://").split("/")
    (folder,) = (pool.state / "checkpoints").glob(f"*/{model.replace(':', '+')}/{kind}/{name}")
    found = {file.name: file.read_bytes() for file in folder.glob("*.safetensors")}
    assert len(found) == 2, found.keys()
    return found


def same_training(pool: LocalPool, one: dict, other: dict) -> None:
    """Holds that two runs of sft.py saw and left the same bits."""
    assert one["losses"] == other["losses"]
    assert one["logprobs"] == other["logprobs"]
    files, others = (checkpoint_files(pool, printed["checkpoint"]) for printed in (one, other))
    assert files.keys() == others.keys()
    assert [name for name in files if files[name] != others[name]] == []
