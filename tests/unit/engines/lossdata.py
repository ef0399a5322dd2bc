"""Random data for every loss, requests as the SDK sends them, and the gradients that an engine holds."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from tinker.proto import tinker_public_pb2 as pb
from torch import Tensor

from plexrl.engines.losses import LOSSES
from plexrl.types import Role
from tests.unit.engines.conftest import VOCABULARY, Node, request

Datum = dict[str, np.ndarray]
SEEDS = st.integers(0, 2**32 - 1)
EVERY = pytest.mark.parametrize("name", list(LOSSES))
CONFIG = {
    "ppo": {"clip_low_threshold": 0.7, "clip_high_threshold": 1.1},
    "cispo": {"clip_low_threshold": 0.5, "clip_high_threshold": 1.5},
    "dro": {"beta": 0.3},
    "gspo": {"clip_low_threshold": 0.9, "clip_high_threshold": 1.05},
    "stable_reinforce": {"kl_coeff": 0.2},
}


def sampled_data(name: str, seed: int, lengths: tuple[int, ...] = (5, 12, 9, 17)) -> list[Datum]:
    """Random prompts and answers, with everything that the loss may be given."""
    rng = np.random.default_rng(seed)
    data = []
    for length in lengths:
        tokens = rng.integers(3, VOCABULARY, length + 1)
        given: Datum = {"tokens": tokens[:-1], "target_tokens": tokens[1:].astype(np.int64)}
        sampled = np.arange(length) >= length // 3
        if name == "cross_entropy":
            given["weights"] = (rng.normal(size=length) * sampled).astype(np.float32)
        else:
            given["advantages"] = (rng.normal(size=length) * sampled).astype(np.float32)
            given["advantages"][rng.integers(length)] = 0
            given["logprobs"] = ((rng.normal(size=length) - 8) * sampled).astype(np.float32)
        if name == "gspo":
            given["sequence_ratio_mask"] = sampled.astype(np.float32)
        if name in ("ppo", "cispo", "gspo") and rng.random() < 0.5:
            given["clip_low_threshold"] = rng.uniform(0.3, 1, length).astype(np.float32)
            given["clip_high_threshold"] = rng.uniform(1, 2, length).astype(np.float32)
        if name == "stable_reinforce":
            given["sampled"] = sampled
        data.append(given)
    return data


def body(name: str, data: list[Datum], **config: float | str) -> bytes:
    """A request with loss_fn_config as the SDK writes it, and provenance where a datum says what was sampled."""
    inputs = [{key: value for key, value in item.items() if key != "sampled"} for item in data]
    message = pb.ForwardBackwardRequest.FromString(request(name, inputs))
    for key, value in config.items():
        if isinstance(value, str):
            message.loss_fn_config_v2[key].text = value
        else:
            message.loss_fn_config[key] = value
            message.loss_fn_config_v2[key].number = value
    for item, datum in zip(data, message.data, strict=True):
        if "sampled" in item:
            prompt = int(np.argmax(item["sampled"]))
            for spans in (datum.model_input_spans, datum.loss_fn_input_spans):
                spans.add().prompt_tokens.MergeFrom(pb.PromptProvenanceSpan(sequence_id="s:0", length=prompt))
                spans.add().sampled_tokens.MergeFrom(
                    pb.SampledProvenanceSpan(sequence_id="s:0", length=len(item["sampled"]) - prompt)
                )
    return message.SerializeToString()


def trainer(node: Node, models: dict[str, str], rank: int | None = None, micro_batch_tokens: int = 24):
    kind = "full" if rank is None else "lora"
    engine = node.build(models["tied"], Role.TRAIN, kind, micro_batch_tokens=micro_batch_tokens)
    engine.create("d", node.state(models["tied"], rank), rank, 3, True, True, True)
    return engine


def gradients(engine) -> dict[str, Tensor]:
    """What the engine holds, taken away from it."""
    bound, _ = engine._use(engine._deployments["d"])
    found = {key: value.clone() for key, value in bound.views["grads"].items()}
    bound.grads.zero_()
    return found


def close(got: dict[str, Tensor], want: dict[str, Tensor], tolerance: float) -> None:
    """Within the tolerance of the largest element of each tensor."""
    assert got.keys() == want.keys()
    for key, value in want.items():
        torch.testing.assert_close(
            got[key].double(), value.double(), rtol=0, atol=tolerance * max(float(value.abs().max()), 1e-6)
        )
