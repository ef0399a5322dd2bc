"""Sampling against plain transformers: what is drawn, its logprobs, batching, versions, limits."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest
import torch
from tinker.proto import tinker_public_pb2 as pb
from transformers import AutoModelForCausalLM

from plexrl.engines.parking import Costs, Meter
from plexrl.engines.protocol import UserError
from plexrl.types import BadInput, Role
from tests.unit.engines.conftest import EOS, VOCABULARY, Node

# The stated bound in float32: logprobs of a draw (decode, any batch) against a forward pass over the whole sequence.
# The tiny model has logits of +-20; on SmolLM2-135M 3.2e-5 was seen.
BOUND = 2e-4


def sampler(node: Node, model_dir: str, kind: str = "lora", **more: object):
    return node.build(model_dir, Role.SAMPLE, kind, **more)


def ask(prompt: list[int], num_samples: int = 1, **params: object) -> bytes:
    extra = {k: params.pop(k) for k in list(params) if k.startswith(("prompt_", "topk_", "record_"))}
    params.setdefault("stop", [])
    if params["stop"] is None:
        del params["stop"]
    chunks = [{"tokens": prompt[:1], "type": "encoded_text"}, {"tokens": prompt[1:], "type": "encoded_text"}]
    return json.dumps(
        {"num_samples": num_samples, "prompt": {"chunks": chunks}, "sampling_params": params, "type": "sample"} | extra
    ).encode()


def drain(engine, most: int = 500) -> dict[str, object]:
    """Step to the end; call -> SampleResponse or UserError."""
    found: dict[str, object] = {}
    while engine.live():
        most -= 1
        assert most
        for call_id, result in engine.step():
            found[call_id] = result if isinstance(result, UserError) else pb.SampleResponse.FromString(result.body)
    return found


def tokens(sequence) -> list[int]:
    return np.frombuffer(sequence.tokens, "<i4").tolist()


def draws(sequence) -> np.ndarray:
    return np.frombuffer(sequence.logprobs, "<f4")


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(3, VOCABULARY, rng.integers(1, 20)).tolist() for _ in range(count)]


def forced(model, prompt: list[int], drawn: list[int]) -> np.ndarray:
    """Logprobs of drawn by one forward pass of plain transformers."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([prompt + drawn])).logits[0].float()
    rows = torch.log_softmax(logits, -1)[len(prompt) - 1 : -1]
    return rows.gather(1, torch.tensor(drawn)[:, None])[:, 0].numpy()


@pytest.mark.parametrize("name", ["tied", "untied", "qwen"])
def test_greedy_equals_generate(node: Node, models: dict[str, str], name: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(models[name])
    engine = sampler(node, models[name])
    asked = prompts(5)
    for index, prompt in enumerate(asked):
        engine.add(str(index), None, ask(prompt, max_tokens=12, temperature=0))
    found = drain(engine)
    for index, prompt in enumerate(asked):
        want = model.generate(
            torch.tensor([prompt]), max_new_tokens=12, min_new_tokens=12, do_sample=False, pad_token_id=0
        )
        assert tokens(found[str(index)].sequences[0]) == want[0, len(prompt) :].tolist()


def test_logprobs_are_those_of_the_draw(node: Node, models: dict[str, str]) -> None:
    """Whatever temperature, top_k and top_p: log softmax of the raw logits, within BOUND of teacher forcing."""
    model = AutoModelForCausalLM.from_pretrained(models["tied"])
    engine = sampler(node, models["tied"])
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


def test_newcomers_join_and_rows_are_reused(node: Node, models: dict[str, str]) -> None:
    model = AutoModelForCausalLM.from_pretrained(models["tied"])
    engine = sampler(node, models["tied"], max_batch=5)
    asked = prompts(12, seed=2)
    found: dict[str, object] = {}
    for index, prompt in enumerate(asked):
        engine.add(str(index), None, ask(prompt, 1 + index % 3, max_tokens=3 + (index * 7) % 40))
        for call_id, result in engine.step():
            found[call_id] = pb.SampleResponse.FromString(result.body)
        assert len(engine._table.rows) <= 5
    found |= drain(engine)
    assert len(found) == 12
    for index, prompt in enumerate(asked):
        for sequence in found[str(index)].sequences:
            np.testing.assert_allclose(draws(sequence), forced(model, prompt, tokens(sequence)), atol=BOUND)


def test_prompt_is_read_once_for_all_samples(node: Node, models: dict[str, str], monkeypatch) -> None:
    engine = sampler(node, models["tied"])
    count = 0
    prefill = engine._prefill

    def counting(sequence) -> None:
        nonlocal count
        count += 1
        prefill(sequence)

    monkeypatch.setattr(engine, "_prefill", counting)
    engine.add("a", None, ask([5, 6, 7], 8, max_tokens=4))
    drain(engine)
    assert count == 1


def test_seeds(node: Node, models: dict[str, str]) -> None:
    engine = sampler(node, models["tied"])
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        engine.add(name, None, ask([9, 8], 2, max_tokens=8, seed=seed))
        drained = drain(engine)[name]
        if name == "a":
            first = [tokens(s) for s in drained.sequences]
            assert first[0] != first[1]
        else:
            assert ([tokens(s) for s in drained.sequences] == first) == (name == "b")


def test_draws_follow_the_distribution(node: Node, models: dict[str, str]) -> None:
    model = AutoModelForCausalLM.from_pretrained(models["tied"])
    engine = sampler(node, models["tied"], kv_bytes=1 << 20)
    count = 3000
    engine.add("a", None, ask([11], count, max_tokens=1, temperature=3.0, seed=5))
    drawn = np.array([tokens(s)[0] for s in drain(engine)["a"].sequences])
    with torch.no_grad():
        want = torch.softmax(model(input_ids=torch.tensor([[11]])).logits[0, -1] / 3.0, -1).numpy()
    got = np.bincount(drawn, minlength=VOCABULARY) / count
    assert np.abs(got - want).max() < 4 * np.sqrt(want.max() / count)


@pytest.mark.parametrize(("top_k", "top_p"), [(3, 1.0), (-1, 0.5), (4, 0.6)])
def test_truncation_keeps_the_likeliest(node: Node, models: dict[str, str], top_k: int, top_p: float) -> None:
    model = AutoModelForCausalLM.from_pretrained(models["tied"])
    engine = sampler(node, models["tied"], kv_bytes=1 << 20)
    engine.add("a", None, ask([11], 400, max_tokens=1, temperature=2.0, seed=5, top_k=top_k, top_p=top_p))
    drawn = {tokens(s)[0] for s in drain(engine)["a"].sequences}
    with torch.no_grad():
        probabilities = torch.softmax(model(input_ids=torch.tensor([[11]])).logits[0, -1] / 2.0, -1)
    values, order = probabilities.sort(descending=True)
    if top_k > 0:
        values, order = values[:top_k] / values[:top_k].sum(), order[:top_k]
    kept = set(order[values.cumsum(-1) - values < top_p].tolist())
    assert drawn <= kept
    assert max(kept, key=lambda t: probabilities[t]) in drawn


def test_stop(node: Node, models: dict[str, str]) -> None:
    engine = sampler(node, models["tied"])
    prompt = [20, 21, 22]
    engine.add("free", None, ask(prompt, max_tokens=30, seed=4))
    free = tokens(drain(engine)["free"].sequences[0])
    token = free[7]
    at = free.index(token)
    text = f"{free[10]};{free[11]};"[1:]
    where = next(i for i in range(30) if text in "".join(f"{t};" for t in free[: i + 1]))
    engine.add("token", None, ask(prompt, max_tokens=30, seed=4, stop=[token]))
    engine.add("string", None, ask(prompt, max_tokens=30, seed=4, stop=text))
    engine.add("strings", None, ask(prompt, max_tokens=30, seed=4, stop=["nowhere", text]))
    found = drain(engine)
    assert tokens(found["token"].sequences[0]) == free[: at + 1]
    for name in ("string", "strings"):
        assert tokens(found[name].sequences[0]) == free[: where + 1]
    assert {s.stop_reason for r in found.values() for s in r.sequences} == {pb.STOP_REASON_STOP}


def test_eos_ends_unless_stop_is_empty(node: Node, models: dict[str, str]) -> None:
    engine = sampler(node, models["tied"], kv_bytes=1 << 20)
    engine.add("eos", None, ask([3], 64, max_tokens=60, temperature=50.0, seed=1, stop=None))
    engine.add("all", None, ask([3], 64, max_tokens=60, temperature=50.0, seed=1))
    found = drain(engine)
    ended = [tokens(s) for s in found["eos"].sequences if s.stop_reason == pb.STOP_REASON_STOP]
    assert ended
    assert all(t[-1] == EOS and EOS not in t[:-1] for t in ended)
    assert all(len(tokens(s)) == 60 for s in found["all"].sequences)
    assert any(EOS in tokens(s)[:-1] for s in found["all"].sequences)


def test_prompt_logprobs_and_top_tables(node: Node, models: dict[str, str]) -> None:
    model = AutoModelForCausalLM.from_pretrained(models["qwen"])
    engine = sampler(node, models["qwen"])
    prompt = prompts(1, seed=9)[0] + [4, 5, 6]
    engine.add(
        "a", None, ask(prompt, max_tokens=1, prompt_logprobs=True, topk_prompt_logprobs=3, topk_sample_logprobs=2)
    )
    found = drain(engine)["a"]
    got = np.frombuffer(found.prompt_logprobs, "<f4")
    assert np.isnan(got[0])
    np.testing.assert_allclose(got[1:], forced(model, prompt[:1], prompt[1:]), atol=BOUND)
    with torch.no_grad():
        rows = torch.log_softmax(model(input_ids=torch.tensor([prompt])).logits[0], -1)
    values, ids = rows.topk(3)
    table = found.topk_prompt_logprobs
    assert (table.k, table.length) == (3, len(prompt))
    assert np.frombuffer(table.token_ids, "<i4").reshape(-1, 3)[1:].tolist() == ids[:-1].tolist()
    assert np.frombuffer(table.logprobs, "<f4")[:3].tolist() == [-99999.0] * 3
    sampled = found.sequences[0].topk_sampled_logprobs
    np.testing.assert_allclose(np.frombuffer(sampled.logprobs, "<f4"), values[-1, :2], atol=BOUND)


PARK = Costs(copy_bps=1e12, read_token_s=1.0)
READ_AGAIN = Costs(copy_bps=1.0, read_token_s=1e-9)


def foreign(engine) -> None:
    """Somebody else's bytes in all of the engine's place, many of them no numbers."""
    engine._home.region.buffer.random_(generator=torch.Generator().manual_seed(1))


def test_offload_parks_live_sequences(models: dict[str, str], monkeypatch) -> None:
    """The same requests with and without leaving the device after every step: the same bits. Only new rows move."""
    monkeypatch.setattr(Meter, "costs", PARK)
    found = []
    for leave in (False, True):
        engine = sampler(Node(), models["tied"])
        for index, prompt in enumerate(prompts(4, seed=3)):
            engine.add(str(index), None, ask(prompt, 2, max_tokens=6 + 3 * index, seed=index))
        got = {}
        while engine.live():
            got |= {call_id: result.body for call_id, result in engine.step()}
            if leave:
                rows = list(engine._table.rows)
                size = engine._table.token_bytes
                new = sum(s.cached - s.parked for s in rows)
                moved = engine.offload()
                assert moved.bytes_out == new * size
                foreign(engine)
                moved = engine.load_device()
                assert [s.parked for s in rows] == [s.cached for s in rows]
                assert engine._table.rows == rows
        found.append(got)
    assert found[0] == found[1]


def test_a_sequence_that_stayed_moves_its_new_tokens_only(models: dict[str, str], monkeypatch) -> None:
    monkeypatch.setattr(Meter, "costs", PARK)
    engine = sampler(Node(), models["tied"])
    engine.add("a", None, ask([5, 6, 7, 8], 2, max_tokens=12))
    size = engine._table.token_bytes
    engine.step()
    moved = [engine.offload().bytes_out]
    engine.load_device()
    engine.step()
    engine.step()
    moved.append(engine.offload().bytes_out)
    engine.load_device()
    moved.append(engine.offload().bytes_out)
    # The prompt and one token, then two tokens more, then nothing, for two rows.
    assert moved == [2 * 5 * size, 2 * 2 * size, 0]


def test_sequences_that_are_read_again_go_on_with_the_same_tokens(models: dict[str, str], monkeypatch) -> None:
    """Nothing of them moves; tokens are the same and logprobs those of the draw within the stated bound."""
    model = AutoModelForCausalLM.from_pretrained(models["tied"])
    asked = prompts(5, seed=6)
    bodies = {
        str(index): ask(prompt, 3, max_tokens=4 + 5 * index, seed=index, prompt_logprobs=True)
        for index, prompt in enumerate(asked)
    }
    unmoved, engine = sampler(Node(), models["tied"]), sampler(Node(), models["tied"], max_batch=8)
    for name, body in bodies.items():
        unmoved.add(name, None, body)
        engine.add(name, None, body)
    want = drain(unmoved)
    found: dict[str, object] = {}
    costs = itertools.cycle([READ_AGAIN, PARK])
    while engine.live():
        found |= {call: pb.SampleResponse.FromString(result.body) for call, result in engine.step()}
        monkeypatch.setattr(Meter, "costs", next(costs))
        live = len(engine._table.rows)
        moved = engine.offload()
        if Meter.costs is READ_AGAIN:
            assert moved.bytes_out == 0 and not engine._table.rows
        else:
            assert len(engine._table.rows) == live
        foreign(engine)
        engine.load_device()
    for index, prompt in enumerate(asked):
        for sequence, same in zip(found[str(index)].sequences, want[str(index)].sequences, strict=True):
            assert tokens(sequence) == tokens(same)
            np.testing.assert_allclose(draws(sequence), forced(model, prompt, tokens(sequence)), atol=BOUND)


def test_some_are_parked_and_some_read_again(models: dict[str, str], monkeypatch) -> None:
    """Long ones are read again, short ones move: rows close up, and each goes on with its own."""
    model = AutoModelForCausalLM.from_pretrained(models["tied"])
    engine = sampler(Node(), models["tied"])
    asked = {str(n): list(range(3, 3 + n)) for n in (4, 30, 6, 40, 5)}
    for name, prompt in asked.items():
        engine.add(name, None, ask(prompt, max_tokens=20, seed=int(name)))
    size = engine._table.token_bytes
    # Reading costs a second, moving a tenth of one per token there and back.
    monkeypatch.setattr(Meter, "costs", Costs(copy_bps=20.0 * size, read_fixed_s=1.0))
    found: dict[str, object] = {}
    engine.step()
    engine.offload()
    assert [len(s.request.prompt) for s in engine._table.rows] == [4, 5, 6]
    assert [len(s.request.prompt) for s in engine._waiting] == [30, 40]
    foreign(engine)
    engine.load_device()
    found |= drain(engine)
    assert found.keys() == asked.keys()
    for name, prompt in asked.items():
        for sequence in found[name].sequences:
            np.testing.assert_allclose(draws(sequence), forced(model, prompt, tokens(sequence)), atol=BOUND)


def test_no_row_shows_what_another_left(models: dict[str, str], monkeypatch) -> None:
    """Whoever had the memory: outside of what a sequence has written, its row is zero; nothing else is read."""
    monkeypatch.setattr(Meter, "costs", PARK)
    engine = sampler(Node(), models["tied"], max_batch=6)
    for index, prompt in enumerate(prompts(9, seed=8)):
        engine.add(str(index), None, ask(prompt, 2, max_tokens=3 + 4 * index))
    while engine.live():
        engine.offload()
        foreign(engine)
        engine.load_device()
        engine.step()
        table = engine._table
        for sequence in table.rows:
            start = table.place(sequence.row)
            for layer in table.layers:
                assert layer[:, start : start + sequence.cached].isfinite().all()
                assert not layer[:, start + sequence.cached : start + table.length].any()


@pytest.mark.parametrize("leave", [False, True], ids=["on-device", "off-device"])
def test_taken_calls_go_on_in_another_replica(models: dict[str, str], leave: bool) -> None:
    """Nothing is drawn twice, the same numbers are drawn next, and logprobs stay those of the draw."""
    model = AutoModelForCausalLM.from_pretrained(models["tied"])
    asked = prompts(5, seed=4)

    bodies = {
        str(index): ask(prompt, 3, max_tokens=4 + 5 * index, seed=index, prompt_logprobs=True, topk_sample_logprobs=2)
        for index, prompt in enumerate(asked)
    }
    unmoved = sampler(Node(), models["tied"])
    old, new = (sampler(Node(), models["tied"], max_batch=8) for _ in range(2))
    for name, body in bodies.items():
        unmoved.add(name, None, body)
        old.add(name, None, body)  # more than fit a batch: some have not begun when they are taken
    want = drain(unmoved)
    found: dict[str, object] = {}
    for _ in range(3):
        found |= {call: pb.SampleResponse.FromString(result.body) for call, result in old.step()}
    if leave:
        old.offload()
    for name, body in bodies.items():
        if name not in found:
            new.add(name, None, body, old.take(name))
    assert not old.live()
    found |= drain(new)
    for index, prompt in enumerate(asked):
        for sequence, same in zip(found[str(index)].sequences, want[str(index)].sequences, strict=True):
            assert tokens(sequence) == tokens(same)
            np.testing.assert_allclose(draws(sequence), forced(model, prompt, tokens(sequence)), atol=BOUND)
    table, same = (set_["1"].sequences[0].topk_sampled_logprobs for set_ in (found, want))
    assert table.token_ids == same.token_ids
    once = np.frombuffer(found["1"].prompt_logprobs, "<f4")
    np.testing.assert_allclose(once, np.frombuffer(want["1"].prompt_logprobs, "<f4"), atol=BOUND)


def test_a_call_cancelled_off_the_device_touches_nothing_there(models: dict[str, str]) -> None:
    model = AutoModelForCausalLM.from_pretrained(models["tied"])
    engine = sampler(Node(), models["tied"])
    asked = prompts(3, seed=5)
    for index, prompt in enumerate(asked):
        engine.add(str(index), None, ask(prompt, 2, max_tokens=9))
    engine.step()
    engine.offload()
    others = engine._home.region.buffer.random_(generator=torch.Generator().manual_seed(1)).clone()
    engine.cancel("0")
    assert torch.equal(engine._home.region.buffer, others)
    engine.load_device()
    found = drain(engine)
    assert found.keys() == {"1", "2"}
    for name, response in found.items():
        for sequence in response.sequences:
            np.testing.assert_allclose(draws(sequence), forced(model, asked[int(name)], tokens(sequence)), atol=BOUND)


def test_what_can_never_run_is_refused(node: Node, models: dict[str, str]) -> None:
    engine = sampler(node, models["tied"], max_context=64, kv_bytes=1 << 14)
    room = engine._table.tokens
    assert room < 64
    for body, text in (
        (ask([3] * 64, max_tokens=1), "no room in a context of 64"),
        (ask([3] * 10, max_tokens=room), "KV memory"),
        (ask([3, VOCABULARY], max_tokens=1), "outside the vocabulary"),
        (ask([3], max_tokens=1, temperature=-1), "temperature"),
        (ask([3], max_tokens=1, top_p=0), "top_p"),
        (ask([3], max_tokens=1, prompt_alt_tokens_k=1), "not built yet"),
        (b"{", "malformed"),
        (b"[]", "malformed"),
    ):
        with pytest.raises(UserError, match=text):
            engine.add("x", None, body)
    assert engine.live() == 0
    engine.add("x", None, ask([3] * 10, max_tokens=room - 9))
    assert len(tokens(drain(engine)["x"].sequences[0])) == room - 9


def test_cancel(node: Node, models: dict[str, str]) -> None:
    model = AutoModelForCausalLM.from_pretrained(models["tied"])
    engine = sampler(node, models["tied"], max_batch=4)
    for name in "abc":
        engine.add(name, None, ask([4, 5, 6], 2, max_tokens=12))
    engine.step()
    engine.cancel("a")
    engine.cancel("unknown")
    found = drain(engine)
    assert found.keys() == {"b", "c"}
    for response in found.values():
        for sequence in response.sequences:
            np.testing.assert_allclose(draws(sequence), forced(model, [4, 5, 6], tokens(sequence)), atol=BOUND)
    assert not engine._table.rows


def test_weights_that_are_no_numbers_fail_their_call_only(node: Node, models: dict[str, str]) -> None:
    engine = sampler(node, models["tied"])
    slab = node.snapshot(models["tied"], 4)
    node.map.view(slab).view(torch.float32).fill_(torch.nan)
    engine.attach("bad", slab, 4, True, True, True)
    for index in range(3):
        engine.add(f"good{index}", None, ask([5, 6], 2, max_tokens=10, seed=1))
        engine.add(f"bad{index}", "bad", ask([5, 6, 7], 2, max_tokens=10, seed=1))
    found = drain(engine)
    assert all(isinstance(found[f"bad{i}"], UserError) for i in range(3))
    assert all(np.isfinite(draws(s)).all() for i in range(3) for s in found[f"good{i}"].sequences)
    with pytest.raises(BadInput, match="not attached"):
        engine.add("x", "nobody", ask([5], max_tokens=1))


def test_bfloat16(node: Node, models: dict[str, str]) -> None:
    """Half precision decodes too; its logprobs agree with teacher forcing as far as its eight bits allow."""
    model = AutoModelForCausalLM.from_pretrained(models["tied"], dtype=torch.bfloat16)
    engine = sampler(node, models["tied"], dtype="bfloat16")
    asked = prompts(3, seed=4)
    for index, prompt in enumerate(asked):
        engine.add(str(index), None, ask(prompt, 2, max_tokens=8 + index, top_k=5))
    for index, response in drain(engine).items():
        for sequence in response.sequences:
            np.testing.assert_allclose(draws(sequence), forced(model, asked[int(index)], tokens(sequence)), atol=0.5)
