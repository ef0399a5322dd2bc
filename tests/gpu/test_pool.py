"""A private pool on one real GPU: a program of the public SDK whose trainer and sampler take turns on it."""

from pathlib import Path

import pytest

from plexrl.config import Model
from plexrl.pool.needs import group_sizes
from plexrl.types import Role, records
from tests.e2e.localpool import LocalPool

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]
MIB = 1 << 20
FIRST_PROMISE = 2 << 30  # of residual bytes, for a group of which nothing was seen yet


def room_for_one(model: Model) -> int:
    """Device bytes that trainer and sampler fit into asleep, and one of them awake."""
    awake = [group_sizes(model, role, "lora") for role in (Role.TRAIN, Role.SAMPLE)]
    return 2 * FIRST_PROMISE + max(sizes.device_bytes + sizes.workspace for sizes in awake) + 4096


def test_a_program_on_a_real_gpu(tmp_path: Path, tiny_model: Path):
    tiny = {
        "path": str(tiny_model),
        "max_context": 128,
        "micro_batch_tokens": 256,
        "sample": {"kv_bytes": 2 * MIB, "max_batch": 16},
        "lora": {"max_rank": 8, "slots": 1},
    }
    device = {"kind": "cuda", "bytes": room_for_one(Model.model_validate(tiny))}
    with LocalPool(tmp_path, {"models": {"tiny": tiny}, "device": device, "host": {"bytes": 256 * MIB}}) as pool:
        seen = pool.run("everything.py", "--rank", "8")
        assert seen["losses"][-1] < 0.5 * seen["losses"][0]
        assert seen["worst_logprob_gap"] < 1e-3
        assert seen["rl_changed_weights"] and seen["reloaded_equal"] and seen["load_state_equal"]
        left = [r.moved for r in pool.records() if isinstance(r, records.Switched) and not r.incoming]
        assert left, "they took turns"
        assert all(0 < moved.residual_bytes <= FIRST_PROMISE for moved in left)
