"""The engines that people run, in a real pool: vLLM draws by what DeepSpeed trains, through nothing but the SDK."""

import psutil
import pytest

from bench.turnabout import measure
from plexrl.config import load
from plexrl.config.engines import missing
from plexrl.types import Role

from .test_program import LOGPROB_BOUND

MIB = 1 << 20

pytestmark = [
    pytest.mark.skipif(
        any(missing(engine, "cpu") for engine in ("vllm", "deepspeed")), reason="an extra is not installed here"
    ),
    # Two engines are built, each with libraries that take seconds of a core to import.
    pytest.mark.timeout(900),
]


@pytest.mark.parametrize(("rank", "gpus", "stage"), [(8, 1, 1), (0, 2, 2)], ids=["lora", "full-gang-of-2"])
def test_train_publish_sample_reload(local_pool, rank, gpus, stage):
    """The program of test_program, with the same demands."""
    engines = {
        "train": {"gpus": gpus, "engine": "deepspeed", "zero_stage": stage},
        "sample": {"replicas": 1, "engine": "vllm", "kv_bytes": 2 * MIB, "max_batch": 16},
    }
    pool = local_pool(gpus=gpus, model=engines)
    model = load(pool.config_file).models["tiny"]
    assert [model.engine_of(role) for role in Role] == ["deepspeed", "vllm"]
    seen = pool.run("everything.py", "--rank", str(rank), timeout=800)
    assert (seen["is_lora"], seen["lora_rank"]) == ((True, rank) if rank else (False, None))
    assert seen["losses"][-1] < 0.5 * seen["losses"][0]
    assert seen["worst_logprob_gap"] < LOGPROB_BOUND
    assert seen["rl_changed_weights"]
    assert seen["reloaded_equal"] and seen["reloaded_trains_equal"] and seen["load_state_equal"]
    assert len(seen["greedy"]) == 4
    assert seen["prompt_logprobs"][0] is None and all(x <= 0 for x in seen["prompt_logprobs"][1:])
    assert seen["base"] == 2


def test_two_groups_of_two_engines_switch_without_growth(tiny_model, tmp_path):
    """A short form of `python -m bench.turnabout`, which makes a hundred switches."""
    found = measure(tmp_path, tiny_model, "deepspeed", "vllm", switches=20, warm=12)
    assert found["switches_in_all"] >= 32
    assert (found["grown"]["descriptors"], found["grown"]["processes"]) == (0, 0)
    # Allocators round up; what leaks in each switch would be more.
    assert found["grown"]["private_bytes"] < 16 * MIB
    assert not [
        process for process in psutil.process_iter(["cmdline"]) if str(tmp_path) in str(process.info["cmdline"])
    ]
