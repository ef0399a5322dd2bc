"""Losses at the gateway: what programs of the SDK send is taken, what is wrong is refused before the head sees it."""

import pytest
import tinker
from tinker import types
from tinker.proto import tinker_public_pb2 as pb

from plexrl.engines.losses import LOSSES
from plexrl.gateway import TinkerGateway
from plexrl.types import Train
from tests.unit.gateway.fakehead import FakeHead
from tests.unit.gateway.test_bad_input import MODEL, forward_backward, refusal

CONFIG = {
    "ppo": {"clip_low_threshold": 0.5, "clip_high_threshold": 3.0},
    "cispo": {"clip_high_threshold": 5.0},
    "dro": {"beta": 0.1},
    "gspo": {"clip_low_threshold": 0.9997},
    "stable_reinforce": {"kl_coeff": 0.0},
}
EVERY = pytest.mark.parametrize("name", list(LOSSES))


@pytest.fixture(scope="module")
def trainer(service: tinker.ServiceClient) -> tinker.TrainingClient:
    return service.create_lora_training_client("smol", rank=8, seed=5).result()


def datum(name: str, spans: bool = True) -> types.Datum:
    """Two tokens of prompt and three sampled ones, with everything that the loss may be given."""
    inputs = {key: [1.0] * 4 for key in (*LOSSES[name].needs, *LOSSES[name].takes)}
    row = types.Datum(
        model_input=types.ModelInput.from_ints([1, 2, 3, 4]),
        loss_fn_inputs={"target_tokens": [2, 3, 4, 5], **inputs},
    )
    if not spans:
        return row
    prompt = types.PromptProvenanceSpan(sequence_id="s0:sampler:0:0:1", length=2)
    return row.with_provenance(
        [prompt, types.SampledProvenanceSpan(sequence_id="s0:sampler:0:0:1", length=2)],
        [
            types.PromptProvenanceSpan(sequence_id="s0:sampler:0:0:1", offset=1, length=1),
            types.SampledProvenanceSpan(sequence_id="s0:sampler:0:0:1", length=3),
        ],
    )


@EVERY
def test_what_programs_send(trainer: tinker.TrainingClient, head: FakeHead, name: str):
    """Provenance comes with every loss: the cookbook attaches it to all of its data."""
    rows = [datum(name), datum(name, spans=name == "stable_reinforce")]
    for config in (None, {}, CONFIG.get(name)):
        trainer.forward_backward(rows, name, config).result()
        asked = head.asked("train")[-1]
        assert asked.units == 8
        sent = pb.ForwardBackwardRequest.FromString(asked.body)
        assert (sent.loss_fn, len(sent.data)) == (name, 2)


def message(name: str, **config: float) -> pb.ForwardBackwardRequest:
    """As the SDK would write it."""
    found = pb.ForwardBackwardRequest(model_id=MODEL, seq_id=3, loss_fn=name)
    row = found.data.add()
    row.model_input.add().encoded_text.tokens = b"\1\0\0\0" * 4
    for key in ("target_tokens", *LOSSES[name].needs):
        row.loss_fn_inputs[key].dtype = pb.DTYPE_INT64 if key == "target_tokens" else pb.DTYPE_FLOAT32
        row.loss_fn_inputs[key].shape.append(4)
    if LOSSES[name].spans:
        row.model_input_spans.add().prompt_tokens.MergeFrom(pb.PromptProvenanceSpan(sequence_id="x", length=4))
        row.loss_fn_input_spans.add().sampled_tokens.MergeFrom(pb.SampledProvenanceSpan(sequence_id="x", length=4))
    for key, value in config.items():
        found.loss_fn_config_v2[key].number = value
    return found


@EVERY
def test_refusals(gateway: TinkerGateway, name: str):
    assert isinstance(gateway.parse(forward_backward(message(name))), Train)
    cases = []
    for key in ("target_tokens", *LOSSES[name].needs):
        lacking = message(name)
        del lacking.data[0].loss_fn_inputs[key]
        cases.append((lacking, f"Datum 0 lacks the loss input '{key}'", f"{name} takes {LOSSES[name].names}"))
    unused = message(name)
    unused.data[0].loss_fn_inputs["mask"].dtype = pb.DTYPE_FLOAT32
    cases.append((unused, f"'mask', which {name} does not use", "It takes target_tokens"))
    cases.append((message(name, epsilon=0.2), f"'epsilon' in the loss_fn_config of {name} is unknown", "It takes "))
    legacy = message(name)
    legacy.loss_fn_config["epsilon"] = 0.2
    cases.append((legacy, "'epsilon'", "It takes "))
    for key in LOSSES[name].settings:
        for value in (float("nan"), float("inf"), -1.0):
            cases.append((message(name, **{key: value}), f"'{key}' in the loss_fn_config of {name} is", "Give "))
    for asked, what, mend in cases:
        error = refusal(gateway, forward_backward(asked))
        assert (error.status, error.consumed) == (400, (MODEL, 3))
        assert what in error.what and mend in error.mend


def test_v2_counts_before_the_legacy_config(gateway: TinkerGateway):
    """A server of before v2 would have read the other map: both are sent."""
    both = message("ppo", clip_high_threshold=1.3)
    both.loss_fn_config["clip_high_threshold"] = 0.3
    assert isinstance(gateway.parse(forward_backward(both)), Train)


@pytest.mark.parametrize("name", ["importance_sampling", "stable_reinforce"])
def test_provenance_that_does_not_tile(gateway: TinkerGateway, name: str):
    """Lengths that are too short, negative or add up past all numbers; one field without the other; nameless runs."""
    cases = []
    for length in (3, 5, 2**63 - 1):
        wrong = message("stable_reinforce")
        wrong.data[0].loss_fn_input_spans[0].sampled_tokens.length = length
        cases.append((wrong, f"loss_fn_inputs covers {length} of 4"))
    negative = message("stable_reinforce")
    negative.data[0].loss_fn_input_spans[0].sampled_tokens.length = 5
    negative.data[0].loss_fn_input_spans.add().prompt_tokens.MergeFrom(
        pb.PromptProvenanceSpan(sequence_id="x", length=-1)
    )
    cases.append((negative, "negative length"))
    half = message("stable_reinforce")
    del half.data[0].model_input_spans[:]
    cases.append((half, "model_input covers 0 of 4"))
    nameless = message("stable_reinforce")
    nameless.data[0].model_input_spans[0].prompt_tokens.sequence_id = ""
    cases.append((nameless, "without kind, sequence_id"))
    empty = message("stable_reinforce")
    empty.data[0].model_input_spans.add()
    cases.append((empty, "without kind, sequence_id"))
    for asked, what in cases:
        asked.loss_fn = name
        error = refusal(gateway, forward_backward(asked))
        assert (error.status, error.consumed) == (400, (MODEL, 3))
        assert what in error.what and error.mend


def test_who_drew_the_data_is_told_to_the_head(gateway: TinkerGateway):
    """Of sampled tokens only; what has no form of the pool's names a session that no pool knows."""
    body, row = message("ppo"), message("ppo").data[0]
    for spans in (row.model_input_spans, row.loss_fn_input_spans):
        for name in ("s0:sample:4:17:1", "s0:sample:4:18:0", "s0:sample:3:1:0", "elsewhere"):
            spans.add().sampled_tokens.MergeFrom(pb.SampledProvenanceSpan(sequence_id=name, length=1))
    body.data[0].CopyFrom(row)
    body.data.append(message("ppo").data[0])
    assert gateway.parse(forward_backward(body)).drawn_by == ("", "s0:sample:3", "s0:sample:4")
    body.data[0].model_input_spans[3].prompt_tokens.MergeFrom(pb.PromptProvenanceSpan(sequence_id="x", length=1))
    body.data[0].loss_fn_input_spans[3].prompt_tokens.MergeFrom(pb.PromptProvenanceSpan(sequence_id="x", length=1))
    assert gateway.parse(forward_backward(body)).drawn_by == ("s0:sample:3", "s0:sample:4")


def test_provenance_that_is_missing(gateway: TinkerGateway):
    bare = message("stable_reinforce")
    del bare.data[0].model_input_spans[:], bare.data[0].loss_fn_input_spans[:]
    assert "Datum.with_provenance" in refusal(gateway, forward_backward(bare)).mend


def test_a_sampling_client_that_records_stability_info(service: tinker.ServiceClient, head: FakeHead):
    """As rl_loop of the cookbook makes it; its sequences have the names that provenance gives."""
    client = service.create_sampling_client(base_model="smol", record_stability_info=True).result()
    params = types.SamplingParams(max_tokens=2)
    found = client.sample(types.ModelInput.from_ints([1, 2]), num_samples=2, sampling_params=params).result()
    names = [sequence.sequence_id for sequence in found.sequences]
    assert len(set(names)) == 2 and all(names)


def test_a_loss_by_handle_runs_in_the_client(service: tinker.ServiceClient, trainer: tinker.TrainingClient):
    """create_custom_loss uploads nothing here; what comes is a forward pass and a linear loss."""

    def squares(logprobs, weights):
        loss = (logprobs.square() * weights).sum()
        return loss, {"custom/squares:sum": loss}

    handle = service.create_custom_loss(squares, {"logprobs": 1, "weights": 1}).result()
    assert handle.loss_id is None
    row = types.Datum(
        model_input=types.ModelInput.from_ints([1, 2]), loss_fn_inputs={"target_tokens": [2, 3], "weights": [1.0, 2.0]}
    )
    result = trainer.forward_backward_custom([row], handle).result()
    assert result.metrics["custom/squares:sum"] == pytest.approx(0.25 * 3)  # the fake head's logprobs are -0.5
