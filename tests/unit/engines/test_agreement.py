"""Trainer and sampler say the same of the same tokens: tied and untied heads, adapted and not."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from plexrl.engines import sizing
from plexrl.types import Role
from tests.unit.engines.conftest import Node, logprobs, request, run, sft
from tests.unit.engines.test_sample import BOUND, ask, drain, draws, sampler, tokens
from tests.unit.engines.test_train_full import ADAM

FAST = json.dumps({"adam_params": ADAM | {"learning_rate": 0.02}}).encode()
PROMPT = [7, 8, 9, 300, 11]
# Largest and mean difference in bfloat16, on logits of +-20; 0.07 and 0.009 were seen.
BOUND_16, MEAN_16 = 0.25, 0.03


class Pair:
    """A trainer after two steps, and a sampler that draws by what it published."""

    def __init__(self, model_dir: str, rank: int | None, unembed: bool, dtype: str = "float32") -> None:
        self.node = Node(1 << 27)
        kind = "full" if rank is None else "lora"
        self.trainer = self.node.build(model_dir, Role.TRAIN, kind, dtype=dtype)
        state = self.node.state(model_dir, rank, unembed, dtype)
        self.trainer.create("d", state, rank, 3, True, True, unembed)
        self.fresh = self.forced([PROMPT])[0]
        for seed in range(2):
            run(self.trainer.forward_backward("d", request("cross_entropy", sft(seed)), False))
            self.trainer.optim_step("d", FAST)
        size = sizing.snapshot_bytes(model_dir, dtype, kind, rank, True, True, unembed)
        slab = self.node.arena.alloc("version", size, 1)
        self.trainer.publish("d", slab, None)
        self.sampler = sampler(self.node, model_dir, kind, extent_offset=1 << 26, dtype=dtype)
        self.sampler.attach("v", slab, rank, True, True, unembed)

    def forced(self, rows: list[list[int]]) -> list[np.ndarray]:
        """The trainer's logprobs of rows[1:], given what stands before."""
        data = []
        for row in rows:
            data.append({"tokens": np.array(row[:-1]), "target_tokens": np.array(row[1:], np.int64)})
        result, _ = run(self.trainer.forward_backward("d", request("cross_entropy", data), True))
        return logprobs(result.body)

    def weights(self) -> dict[str, torch.Tensor]:
        """The trained tensors, where they lie."""
        bound, _ = self.trainer._use(self.trainer._deployments["d"])
        return bound.views["weights"]


@pytest.mark.parametrize("name", ["tied", "untied"])
@pytest.mark.parametrize(
    ("rank", "unembed"), [(4, True), (4, False), (None, True)], ids=["lora", "lora-without-head", "full"]
)
def test_trainer_and_sampler_agree(models: dict[str, str], name: str, rank: int | None, unembed: bool) -> None:
    """Logprobs of drawn tokens and of the prompt, against a forward pass of the trainer; the training shows in both."""
    pair = Pair(models[name], rank, unembed)
    pair.sampler.add("x", "v", ask(PROMPT, 4, max_tokens=9, seed=5, prompt_logprobs=True))
    found = drain(pair.sampler)["x"]
    forced = pair.forced([PROMPT + tokens(sequence) for sequence in found.sequences])
    for sequence, theirs in zip(found.sequences, forced, strict=True):
        np.testing.assert_allclose(draws(sequence), theirs[len(PROMPT) - 1 :], atol=BOUND)
    prompt = np.frombuffer(found.prompt_logprobs, "<f4")
    np.testing.assert_allclose(prompt[1:], forced[0][: len(PROMPT) - 1], atol=BOUND)
    assert np.abs(prompt[1:] - pair.fresh).max() > 100 * BOUND


@pytest.mark.parametrize("name", ["tied", "untied"])
@pytest.mark.parametrize("rank", [4, None], ids=["lora", "full"])
def test_agreement_in_bfloat16(models: dict[str, str], name: str, rank: int | None) -> None:
    """Looser: decoding and a forward pass round differently in eight bits."""
    pair = Pair(models[name], rank, True, "bfloat16")
    for seed in range(4):
        pair.sampler.add(str(seed), "v", ask(PROMPT, 4, max_tokens=12, seed=seed))
    gaps = []
    for found in drain(pair.sampler).values():
        forced = pair.forced([PROMPT + tokens(sequence) for sequence in found.sequences])
        pairs = zip(found.sequences, forced, strict=True)
        gaps += [np.abs(draws(sequence) - theirs[len(PROMPT) - 1 :]) for sequence, theirs in pairs]
    assert np.max(gaps) < BOUND_16
    assert np.mean(gaps) < MEAN_16


@pytest.mark.parametrize("unembed", [True, False])
def test_a_tied_head_is_adapted_and_its_embedding_is_not(models: dict[str, str], unembed: bool) -> None:
    """The adapter of a tied head works on logits alone: zeroing it undoes what it did, and tokens come in as before."""
    pair = Pair(models["tied"], 4, unembed)
    heads = {key: value for key, value in pair.weights().items() if ".lm_head." in key}
    assert len(heads) == (2 if unembed else 0)
    if not unembed:
        return
    assert all(value.any() for value in heads.values())
    trained = pair.forced([PROMPT])[0]
    adapters = {key: value.clone() for key, value in pair.weights().items()}
    for key, value in heads.items():
        value.zero_()
        assert not pair.weights()[key].any()
    without = pair.forced([PROMPT])[0]
    assert np.abs(trained - without).max() > 100 * BOUND
    for value in pair.weights().values():
        value.zero_()
    np.testing.assert_array_equal(pair.forced([PROMPT])[0], pair.fresh)  # the shared base weight was never touched
    for key, value in pair.weights().items():
        value.copy_(adapters[key])
    np.testing.assert_array_equal(pair.forced([PROMPT])[0], trained)
