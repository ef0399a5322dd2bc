"""A program that uses nothing but the public tinker SDK, on a private pool: LoRA and full parameters."""

import pytest

# Sampled and teacher-forced logprobs differ by the order of float32 sums: batch shapes, KV cache (docs/users.md).
LOGPROB_BOUND = 1e-3


@pytest.mark.parametrize(("rank", "gpus"), [(8, 1), (0, 2)], ids=["lora", "full-gang-of-2"])
def test_sft_rl_save_reload_sample(local_pool, rank, gpus):
    seen = local_pool(gpus=gpus).run("everything.py", "--rank", str(rank))
    assert seen["models"] == ["tiny"]
    assert (seen["is_lora"], seen["lora_rank"]) == ((True, rank) if rank else (False, None))
    assert seen["losses"][-1] < 0.5 * seen["losses"][0]
    assert seen["same_seed_same_tokens"]
    assert seen["worst_logprob_gap"] < LOGPROB_BOUND
    assert seen["rl_changed_weights"]
    assert seen["reloaded_equal"] and seen["reloaded_trains_equal"] and seen["load_state_equal"]
    assert seen["published"].endswith("/sampler_weights/published")
    assert len(seen["greedy"]) == 4
    assert seen["prompt_logprobs"][0] is None and all(x <= 0 for x in seen["prompt_logprobs"][1:])
    assert seen["base"] == 2
