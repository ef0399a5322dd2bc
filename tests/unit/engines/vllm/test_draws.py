"""What is drawn, its logprobs, seeds, stops: against plain transformers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tinker.proto import tinker_public_pb2 as pb
from transformers import AutoModelForCausalLM

from plexrl.engines.protocol import UserError
from plexrl.types import BadInput
from tests.unit.engines.test_sample import ask, drain, draws, forced, tokens

# The stated bound in float32: logprobs of a draw against a forward pass over the whole sequence.
BOUND = 2e-4


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(3, 500, rng.integers(1, 40)).tolist() for _ in range(count)]


@pytest.mark.parametrize("name", ["tied", "untied", "qwen"])
def test_greedy_equals_generate(replicas, vllm_models: dict[str, str], name: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(vllm_models[name])
    _, engine = replicas(name)
    asked = prompts(5)
    for index, prompt in enumerate(asked):
        engine.add(str(index), None, ask(prompt, max_tokens=12, temperature=0))
    found = drain(engine)
    for index, prompt in enumerate(asked):
        want = model.generate(
            torch.tensor([prompt]), max_new_tokens=12, min_new_tokens=12, do_sample=False, pad_token_id=0
        )
        assert tokens(found[str(index)].sequences[0]) == want[0, len(prompt) :].tolist()


def test_logprobs_are_those_of_the_draw(replicas, vllm_models: dict[str, str]) -> None:
    """Whatever temperature, top_k and top_p: log softmax of the raw logits, within BOUND of teacher forcing."""
    model = AutoModelForCausalLM.from_pretrained(vllm_models["tied"])
    _, engine = replicas("tied")
    settings = [{}, {"temperature": 0.5}, {"top_k": 5}, {"top_p": 0.7}, {"temperature": 2.0, "top_k": 50, "top_p": 0.9}]
    asked = prompts(len(settings), seed=1)
    for index, (prompt, more) in enumerate(zip(asked, settings, strict=True)):
        engine.add(str(index), None, ask(prompt, 3, max_tokens=10 + index, **more))
    found = drain(engine)
    for index, prompt in enumerate(asked):
        assert len(found[str(index)].sequences) == 3
        for sequence in found[str(index)].sequences:
            assert sequence.stop_reason == pb.STOP_REASON_LENGTH
            assert len(tokens(sequence)) == 10 + index
            np.testing.assert_allclose(draws(sequence), forced(model, prompt, tokens(sequence)), atol=BOUND)


def test_seeds(replicas) -> None:
    _, engine = replicas("tied")
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        engine.add(name, None, ask([9, 8], 2, max_tokens=8, seed=seed))
        drained = drain(engine)[name]
        if name == "a":
            first = [tokens(s) for s in drained.sequences]
            assert first[0] != first[1]
        else:
            assert ([tokens(s) for s in drained.sequences] == first) == (name == "b")


def test_stops_end_a_sequence(replicas) -> None:
    """Token ids, and a string that spans tokens; what is found is part of the answer, as on the torch engine."""
    _, engine = replicas("tied")
    engine.add("free", None, ask([5, 6, 7], max_tokens=20, temperature=0))
    drawn = tokens(drain(engine)["free"].sequences[0])
    stop = next(i for i in range(3, 20) if drawn[i] not in drawn[:i])
    text = f"{drawn[stop - 1]};{drawn[stop]};"
    engine.add("id", None, ask([5, 6, 7], max_tokens=20, temperature=0, stop=[drawn[stop]]))
    engine.add("text", None, ask([5, 6, 7], max_tokens=20, temperature=0, stop=[text]))
    found = drain(engine)
    for name in ("id", "text"):
        assert found[name].sequences[0].stop_reason == pb.STOP_REASON_STOP
        assert tokens(found[name].sequences[0]) == drawn[: stop + 1]


def test_prompt_logprobs_and_tables(replicas, vllm_models: dict[str, str]) -> None:
    model = AutoModelForCausalLM.from_pretrained(vllm_models["tied"])
    _, engine = replicas("tied")
    prompt = prompts(1, seed=9)[0] + [7, 8, 9]
    body = ask(prompt, 2, max_tokens=2, prompt_logprobs=True, topk_prompt_logprobs=3, topk_sample_logprobs=2)
    engine.add("a", None, body)
    engine.add("one", None, ask([5], max_tokens=1, prompt_logprobs=True))
    drained = drain(engine)
    found = drained["a"]
    with torch.no_grad():
        rows = torch.log_softmax(model(input_ids=torch.tensor([prompt])).logits[0].float(), -1)
    got = np.frombuffer(found.prompt_logprobs, "<f4")
    assert np.isnan(got[0])
    np.testing.assert_allclose(got[1:], rows[:-1].gather(1, torch.tensor(prompt[1:])[:, None])[:, 0], atol=BOUND)
    values, ids = rows.topk(3)
    table = found.topk_prompt_logprobs
    assert (table.k, table.length) == (3, len(prompt))
    assert np.frombuffer(table.token_ids, "<i4").reshape(-1, 3)[1:].tolist() == ids[:-1].tolist()
    np.testing.assert_allclose(np.frombuffer(table.logprobs, "<f4").reshape(-1, 3)[1:], values[:-1], atol=BOUND)
    for sequence in found.sequences:
        top = sequence.topk_sampled_logprobs
        np.testing.assert_allclose(np.frombuffer(top.logprobs, "<f4")[:2], values[-1, :2], atol=BOUND)
    assert np.isnan(np.frombuffer(drained["one"].prompt_logprobs, "<f4")).tolist() == [True]


def test_a_call_goes_on_elsewhere(replicas, vllm_models: dict[str, str]) -> None:
    """Taken after some tokens and added again: those stay, and a seeded call ends as if it had stayed."""
    model = AutoModelForCausalLM.from_pretrained(vllm_models["tied"])
    _, engine = replicas("tied")
    body = ask([5, 6, 7], 2, max_tokens=16, seed=3, prompt_logprobs=True)
    engine.add("stays", None, body)
    want = drain(engine)["stays"]
    engine.add("goes", None, body)
    for _ in range(6):
        engine.step()
    drawn, partial = engine.drawn("goes")
    assert drawn == 12
    state = engine.take("goes")
    assert engine.live() == 0
    engine.add("again", None, body, state)
    got = drain(engine)["again"]
    before = pb.SampleResponse.FromString(partial)
    for index in range(2):
        assert tokens(got.sequences[index]) == tokens(want.sequences[index])
        assert draws(got.sequences[index])[:6].tolist() == draws(before.sequences[index]).tolist()
        wanted = forced(model, [5, 6, 7], tokens(got.sequences[index]))
        np.testing.assert_allclose(draws(got.sequences[index]), wanted, atol=BOUND)
    np.testing.assert_allclose(
        np.frombuffer(got.prompt_logprobs, "<f4"), np.frombuffer(want.prompt_logprobs, "<f4"), atol=BOUND
    )


def test_more_than_fits_waits(replicas) -> None:
    _, engine = replicas("tied")
    for index, prompt in enumerate(prompts(12, seed=2)):
        engine.add(str(index), None, ask(prompt, 3, max_tokens=3 + (index * 7) % 40))
    assert engine.live() == 12
    engine.cancel("3")
    engine.cancel("unknown")
    found = drain(engine)
    assert len(found) == 11
    assert not isinstance(found["0"], UserError)


def test_bad_input(replicas) -> None:
    _, engine = replicas("tied")
    for body in (b"{", ask([], max_tokens=1), ask([600], max_tokens=1), ask([5], max_tokens=4000)):
        with pytest.raises(UserError):
            engine.add("bad", None, body)
    with pytest.raises(BadInput, match="not attached"):
        engine.add("bad", "v9", ask([5], max_tokens=1))
    assert engine.live() == 0
    assert engine.step() == []


def test_a_prompt_of_blocks_is_read_once(replicas) -> None:
    """Eight samples of one long prompt: its whole blocks are read by the first of them only."""
    _, engine = replicas("tied")
    prompt = [3 + index % 480 for index in range(70)]
    engine.add("a", None, ask(prompt, 8, max_tokens=3, temperature=0, prompt_logprobs=True))
    read = []
    found = {}
    while engine.live():
        found |= {call: pb.SampleResponse.FromString(result.body) for call, result in engine.step()}
        read.append(engine._draws.scheduled)
    assert read[:2] == [70, 1 + 7 * (70 - 64)]
    assert len({tuple(tokens(s)) for s in found["a"].sequences}) == 1
