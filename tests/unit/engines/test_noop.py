"""The noop engine's results are formed as the SDK wants them."""

from __future__ import annotations

import json

import pytest
from tinker.proto.response_conv import deserialize_forward_backward_output, deserialize_sample_response

from plexrl.engines.protocol import EngineSpec, UserError, build
from plexrl.types import Role
from tests.unit.engines.conftest import request, run, sft


def engine(role: Role, rank: int = 0):
    return build(EngineSpec(engine="noop", role=role, kind="lora", model_dir="", rank=rank), None, None)


def test_train() -> None:
    trainer = engine(Role.TRAIN)
    result, yields = run(trainer.forward_backward("d", request("cross_entropy", sft(0)), False))
    output = deserialize_forward_backward_output(result.body)
    assert [len(o["logprobs"].data) for o in output.loss_fn_outputs] == [5, 12, 9, 17]
    assert output.metrics == {"loss:sum": 0.0}
    assert (result.units, yields) == (43, 1)
    assert json.loads(trainer.optim_step("d", b"{}").body) == {"metrics": {}}
    other, yields = run(engine(Role.TRAIN, 1).forward_backward("d", request("cross_entropy", sft(0)), False))
    assert (other.body, yields) == (b"", 1)
    with pytest.raises(UserError, match="malformed"):
        run(trainer.forward_backward("d", b"\x0a\xff", False))


def test_sample() -> None:
    sampler = engine(Role.SAMPLE)
    sampler.add("a", None, json.dumps({"num_samples": 2, "sampling_params": {"max_tokens": 3}}).encode())
    sampler.add("b", None, b"[")
    sampler.add("c", None, b"{}")
    sampler.cancel("c")
    assert sampler.live() == 2
    found = dict(sampler.step())
    assert sampler.live() == 0
    response = deserialize_sample_response(found["a"].body)
    assert [list(s.tokens) for s in response.sequences] == [[0, 0, 0]] * 2
    assert isinstance(found["b"], UserError)
