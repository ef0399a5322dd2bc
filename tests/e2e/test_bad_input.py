"""Bad input to a whole pool: every fault has a clear error that names the mend, and the pool serves on, whole."""

import asyncio
import math
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy
import pytest
import tinker
import yaml
from tinker import types
from tinker.proto import tinker_public_pb2 as pb

from .localpool import LocalPool
from .rawclient import Answer, HttpClient, datum_of

MIB = 1 << 20
ROW = list(range(1, 17))


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[LocalPool]:
    tiny = {
        "path": str(tiny_model),
        "max_context": 128,
        "micro_batch_tokens": 256,
        "sample": {"kv_bytes": 2 * MIB, "max_batch": 16},
        "lora": {"max_rank": 8, "slots": 1},
    }
    config = {
        "models": {
            "tiny": tiny,
            "short": {**tiny, "max_context": 32},
            "elsewhere": {**tiny, "accounts": ["another"]},
            # A slot of rank 4096 is larger than the device; two states of rank 512 are larger than the arena.
            "vast": {**tiny, "lora": {"max_rank": 4096, "slots": 1}},
            "heavy": {**tiny, "lora": {"max_rank": 512, "slots": 1}},
            # The KV memory of either could be parked on the host, not that of both.
            "hoarder": {**tiny, "sample": {"kv_bytes": 20 * MIB}},
            "twin": {**tiny, "sample": {"kv_bytes": 20 * MIB}},
        },
        "device": {"kind": "cpu", "bytes": 64 * MIB},
        "host": {"bytes": 36 * MIB},
        "limits": {"models_per_job": 3, "sequence_gap": "2s", "body_bytes": "1MiB", "pending_calls": 64},
    }
    with LocalPool(tmp_path_factory.mktemp("bad-input"), config) as pool:
        yield pool


@pytest.fixture(scope="module")
def job(pool: LocalPool) -> Iterator[HttpClient]:
    client = HttpClient(pool)
    yield client
    client.close()


@pytest.fixture
def model(job: HttpClient) -> Iterator[str]:
    """A fresh model of the shared job; afterwards the pool must still serve it, and lets it go."""
    made = job.model()
    yield made
    job.unload(made)


@pytest.fixture(scope="module")
def service(job: HttpClient) -> Iterator[tinker.ServiceClient]:
    """The unmodified SDK in the same job."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TINKER_TELEMETRY", "0")
        client = tinker.ServiceClient(base_url=job.url, api_key=job.key)
        yield client
        client.close(status="success").result()


def refused(answer: Answer, *words: str, status: int = 400) -> str:
    """The answer is a refusal in these words, with a mend."""
    assert answer.status == status, (answer.status, answer.body)
    assert answer.json["mend"]
    for word in words:
        assert word in answer.detail
    return answer.detail


def failed(job: HttpClient, answer: Answer, *words: str, category: str = "user") -> str:
    """The call was accepted and its future ends as an error in these words."""
    ended = job.wait(answer)
    assert ended.status == 200 and ended.failed, ended.body
    assert ended.json["category"] == category, ended.json
    for word in words:
        assert word in ended.detail, ended.detail
    return ended.detail


def works(job: HttpClient, model: str, seq: int) -> list[float]:
    """The model trains on at this seq; its logprobs."""
    ended = job.wait(job.train(model, seq))
    assert ended.status == 200 and not ended.failed, ended.body
    return ended.logprobs()


# -- base models and ranks ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["nonsense", "HuggingFaceTB/SmolLM2-135M-Instruct", "elsewhere"])
def test_base_models_that_are_not_served_here(job: HttpClient, service: tinker.ServiceClient, name: str):
    served = "Use one of: heavy, hoarder, short, tiny, twin, vast"
    detail = refused(job.ask_model(name), name, served, "no paths or hub ids")
    assert "elsewhere" not in detail.split("Use one of")[1]
    refused(job.ask_sampler(base=name), name, served)
    with pytest.raises(tinker.BadRequestError, match="no paths or hub ids"):
        service.create_lora_training_client(name, rank=8).result()


def test_a_path_as_base_model(pool: LocalPool, job: HttpClient):
    for name in (pool.config["models"]["tiny"]["path"], "../tiny", "tiny/../tiny", "file:///etc/passwd"):
        refused(job.ask_model(name), "not by a path or address")
        refused(job.ask_sampler(base=name), "not by a path or address")


def test_ranks_out_of_range(job: HttpClient, service: tinker.ServiceClient):
    for rank in (-1, 9, 10**9):
        refused(job.ask_model(rank=rank), f"LoRA rank {rank} is out of range", "Give 1 to 8")
    with pytest.raises(tinker.BadRequestError, match="Give 1 to 8"):
        service.create_lora_training_client("tiny", rank=64).result()


def test_a_model_id_stands_for_one_model(job: HttpClient, model: str):
    again = int(model.rpartition(":")[2])
    assert job.ask_model(model_seq_id=again).json["model_id"] == model
    refused(job.ask_model(rank=4, model_seq_id=again), "created otherwise")
    refused(job.ask_model("short", model_seq_id=again), "created otherwise")


# -- memory ------------------------------------------------------------------------------------------------------------


def test_a_model_larger_than_the_device(job: HttpClient, model: str):
    refused(job.ask_model("vast", 8), "needs 1 GPUs with", "the largest has 67108864 bytes", "Use a smaller model")
    works(job, model, 1)


def test_host_memory_is_refused_and_given_back(job: HttpClient, model: str):
    first = job.model("heavy", 512)
    for _ in range(2):  # what the refused one had taken must be free for the next
        failed(job, job.ask_model("heavy", 512), "of the host arena", "Raise host.bytes, end a job")
    works(job, first, 1)
    works(job, model, 1)
    for _ in range(3):
        job.unload(first)
        first = job.model("heavy", 512)
    works(job, first, 1)
    job.unload(first)


def test_a_sampler_that_cannot_be_parked(pool: LocalPool, job: HttpClient, model: str):
    other = HttpClient(pool)
    try:
        other.sampler(base="hoarder")
        for _ in range(2):
            refused(job.ask_sampler(base="twin"), "1 nodes are short of host memory", "fewer GPUs or bytes")
    finally:
        other.close()
    good = job.sampler(base="tiny")
    assert not job.wait(job.sample(good, 1)).failed
    works(job, model, 1)


def test_too_many_models(job: HttpClient, model: str):
    others = [job.model() for _ in range(2)]
    refused(job.ask_model(), "has 3 models", "limits.models_per_job", "Unload one")
    for other in others:
        job.unload(other)
    job.unload(job.model())


# -- training data -----------------------------------------------------------------------------------------------------


def test_malformed_bodies(job: HttpClient, model: str):
    good = datum_of(model, 1, ROW).SerializeToString()
    for body in (b"", b"{}", b"\xff" * 64, good[:-3], b"\0" * 100):
        assert job.protobuf(body).status == 400
    deep = b"[" * 2000 + b"]" * 2000
    for route in ("asample", "optim_step", "save_weights", "load_weights", "create_model", "retrieve_future"):
        for body in (b"", b"{", b"\xff\xfe", b"[]", b'{"seq_id": NaN}', b'{"model_id": "m", "x": ' + deep + b"}"):
            answer = job.post(route, body)
            assert (answer.status, bool(answer.detail)) == (400, True), (route, body[:40], answer.body)
    works(job, model, 1)


def test_json_that_is_deep_where_nobody_looks(job: HttpClient):
    """The gateway skips unknown fields; how deep they are must not end the engine."""
    sampler = job.sampler(base="tiny")
    for depth in (900, 950, 970, 980, 990, 1000):
        nested = "[" * depth + "]" * depth
        body = (
            f'{{"sampling_session_id": "{sampler}", "seq_id": {depth}, "num_samples": 1, "prompt": {{"chunks": '
            f'[{{"tokens": [1, 2], "type": "encoded_text"}}]}}, "sampling_params": {{"max_tokens": 2, "x": {nested}}}}}'
        )
        answer = job.post("asample", body.encode())
        assert answer.status == 400 or job.wait(answer).status == 200


def test_a_body_that_is_too_large(job: HttpClient, model: str):
    answer = job.train(model, 1, ROW, rows=8000)
    assert answer.status == 413 and "1048576" in answer.detail
    assert job.post("asample", b" " * (2 * MIB)).status == 413
    works(job, model, 1)


def test_tokens_outside_the_vocabulary(job: HttpClient, service: tinker.ServiceClient, model: str):
    for seq, token in enumerate((-1, 259, 2**31 - 1), 1):
        failed(job, job.train(model, seq, [1, token, 2]), f"{token} is outside the vocabulary", "Use 0 to 258")
    sampler = job.sampler(base="tiny")
    failed(job, job.sample(sampler, 1, [1, 259]), "outside the vocabulary", "Use 0 to 258")
    works(job, model, 4)
    trainer = service.create_lora_training_client("tiny", rank=8).result()
    datum = types.Datum(
        model_input=types.ModelInput.from_ints([1, 2]),
        loss_fn_inputs={"target_tokens": [1, 5000], "weights": [1.0, 1.0]},
    )
    with pytest.raises(tinker.RequestFailedError, match="target token 5000 is outside the vocabulary"):
        trainer.forward_backward([datum], "cross_entropy").result()
    assert trainer.forward_backward([_good_datum()], "cross_entropy").result().metrics["loss:sum"] > 0
    job.unload(trainer.get_info().model_id)


def test_sequences_longer_than_the_context(job: HttpClient, model: str):
    refused(job.train(model, 1, [1] * 129), "129 tokens", "128")
    works(job, model, 2)
    short = job.model("short")
    # The gateway knows the longest model of the pool, the engine its own.
    failed(job, job.train(short, 1, [1] * 33), "33 tokens exceed the context of 32", "Send shorter sequences")
    works(job, short, 2)
    job.unload(short)


def test_prompts_longer_than_the_context(job: HttpClient, service: tinker.ServiceClient):
    tiny, short = job.sampler(base="tiny"), job.sampler(base="short")
    refused(job.sample(tiny, 1, [1] * 125), "do not fit", "context of 128")
    refused(job.sample(tiny, 2, [1] * 200, max_tokens=None), "context of 128")
    failed(job, job.sample(short, 1, [1] * 40), "leaves no room in a context of 32", "Send a shorter one")
    failed(job, job.sample(short, 2, [1] * 30), "1 to 2 fit a context of 32", "Lower it or shorten the prompt")
    assert not job.wait(job.sample(short, 3, [1] * 28)).failed
    client = service.create_sampling_client(base_model="tiny")
    with pytest.raises(tinker.BadRequestError, match="context of 128"):
        client.result().sample(
            types.ModelInput.from_ints([1] * 128), num_samples=1, sampling_params=types.SamplingParams(max_tokens=4)
        ).result()


def test_shapes_that_do_not_agree(job: HttpClient, model: str):
    def changed(seq: int, name: str, **fields: object) -> pb.ForwardBackwardRequest:
        message = datum_of(model, seq, ROW)
        tensor = message.data[0].loss_fn_inputs[name]
        for field, value in fields.items():
            if field == "shape":
                del tensor.shape[:]
                tensor.shape.extend(value)
            else:
                setattr(tensor, field, value)
        return message

    bad = [
        changed(1, "weights", shape=[17]),
        changed(2, "weights", shape=[-1, 2]),
        changed(3, "target_tokens", dense=b"\0" * 120),
        changed(4, "weights", dense=b"\0" * 3),
        changed(5, "target_tokens", shape=[2**31 - 1]),
    ]
    for message in bad:
        answer = job.protobuf(message.SerializeToString())
        if answer.status == 200:
            failed(job, answer, "datum 0")
        else:
            refused(answer, "atum 0")
    works(job, model, 6)


def test_sparse_targets_that_are_huge_in_memory(job: HttpClient, model: str):
    message = datum_of(model, 1, [1])
    for name, dtype in (("target_tokens", "<i8"), ("weights", "<f4")):
        tensor = message.data[0].loss_fn_inputs[name]
        del tensor.shape[:]
        tensor.shape.extend([1, 1 << 27])
        tensor.sparse_csr.crow_indices = numpy.asarray([0, 1], "<i8").tobytes()
        tensor.sparse_csr.col_indices = numpy.asarray([0], "<i8").tobytes()
        tensor.sparse_csr.values = numpy.asarray([1], dtype).tobytes()
    answer = job.protobuf(message.SerializeToString())
    if answer.status == 200:
        failed(job, answer, "reasonable size")
    else:
        refused(answer)
    works(job, model, 2)


# -- numbers -----------------------------------------------------------------------------------------------------------


def test_a_loss_that_is_no_number(job: HttpClient, service: tinker.ServiceClient, model: str):
    before = works(job, model, 1)
    message = datum_of(model, 2, ROW)
    message.data[0].loss_fn_inputs["weights"].dense = numpy.full(len(ROW), math.nan, "<f4").tobytes()
    failed(job, job.protobuf(message.SerializeToString()), "weights holds NaN or infinity", "Send finite numbers")
    message.seq_id = 3
    message.data[0].loss_fn_inputs["weights"].dense = numpy.full(len(ROW), 3e38, "<f4").tobytes()
    failed(job, job.protobuf(message.SerializeToString()), "the loss is not finite")
    # Neither weights nor gradients were touched: without the first call's gradients nothing would change here.
    assert job.wait(job.train(model, 4, forward_only=True)).logprobs() == before
    assert job.wait(job.step(model, 5)).json["metrics"]["grad_norm"] > 0
    trainer = service.create_lora_training_client("tiny", rank=8).result()
    ruined = _good_datum()
    ruined.loss_fn_inputs["weights"] = types.TensorData(data=[math.inf, 1.0], dtype="float32", shape=[2])
    with pytest.raises(tinker.RequestFailedError, match="NaN or infinity"):
        trainer.forward_backward([ruined], "cross_entropy").result()
    job.unload(trainer.get_info().model_id)


def test_optimizer_settings_out_of_range(job: HttpClient, service: tinker.ServiceClient, model: str):
    bad = [{"learning_rate": -1e-4}, {"learning_rate": 2.0}, {"beta1": 1.0}, {"eps": 0.0}, {"eps": 1e-60}]
    bad += [{"weight_decay": -1.0}, {"grad_clip_norm": -1.0}]
    for seq, adam in enumerate(bad, 1):
        refused(job.step(model, seq, **adam), next(iter(adam)))
    # The smallest eps that is taken, without any gradient: all weights stay numbers.
    assert not job.wait(job.step(model, len(bad) + 1, eps=1e-30)).failed
    assert all(math.isfinite(x) for x in works(job, model, len(bad) + 2))
    trainer = service.create_lora_training_client("tiny", rank=8).result()
    with pytest.raises(tinker.BadRequestError, match="learning_rate"):
        trainer.optim_step(types.AdamParams(learning_rate=5.0)).result()
    assert trainer.forward_backward([_good_datum()], "cross_entropy").result().metrics["loss:sum"] > 0
    job.unload(trainer.get_info().model_id)


def test_sampling_parameters_out_of_range(job: HttpClient):
    sampler = job.sampler(base="tiny")
    bad = [{"temperature": -1.0}, {"top_p": 0.0}, {"top_k": -5}, {"max_tokens": 0}, {"seed": 2**70}]
    for seq, params in enumerate(bad, 1):
        refused(job.sample(sampler, seq, **params), next(iter(params)))
    refused(job.sample(sampler, 50, samples=0), "num_samples")
    refused(job.sample(sampler, 51, samples=10**6), "num_samples")
    # As good as greedy, and no number overflows on the way.
    cold = job.wait(job.sample(sampler, 60, temperature=1e-300))
    greedy = job.wait(job.sample(sampler, 61, temperature=0.0))
    tokens = [pb.SampleResponse.FromString(answer.body).sequences[0].tokens for answer in (cold, greedy)]
    assert tokens[0] == tokens[1]


# -- order -------------------------------------------------------------------------------------------------------------


def test_calls_in_reverse_order(job: HttpClient, model: str):
    """seq 3, 2, 1: run as 1, 2, 3, as a twin that got them in order."""
    twin = job.model()
    job.wait(job.save(model, 1, "start"))
    path = f"tinker://{model}/weights/start"
    job.wait(job.load(twin, 1, path))
    backwards = {4: job.step(model, 4), 3: job.train(model, 3, ROW[::-1]), 2: job.train(model, 2)}
    forwards = {2: job.train(twin, 2), 3: job.train(twin, 3, ROW[::-1]), 4: job.step(twin, 4)}
    for seq in (2, 3):
        assert job.wait(backwards[seq]).logprobs() == job.wait(forwards[seq]).logprobs()
    assert job.wait(backwards[4]).json == job.wait(forwards[4]).json
    assert works(job, model, 5) == works(job, twin, 5)
    job.unload(twin)


def test_a_gap_that_never_closes(job: HttpClient, model: str):
    first, behind = job.train(model, 3), job.train(model, 5)
    later = []
    with ThreadPoolExecutor(1) as waiting:
        ended = waiting.submit(job.wait, first)
        # Whoever goes on submitting behind the gap does not keep it open.
        while not ended.done():
            later.append(job.train(model, 6 + len(later)))
            assert len(later) < 60
            time.sleep(0.5)
    for answer in (first, behind):
        failed(job, answer, f"seq_id 1 of {model} never came", "Go on with ")
    for answer in later:
        assert job.wait(answer).status == 200
    refused(job.train(model, 1), "is used up")
    refused(job.train(model, 4), "is used up")
    works(job, model, 6 + len(later))


def test_a_gap_of_two_thousand_millions(job: HttpClient, model: str):
    far = job.train(model, 2**31 - 1)
    failed(job, far, "never came")
    assert job.post("get_info", model_id=model, type="get_info").status == 200


def test_the_same_seq_id_again(job: HttpClient, model: str):
    first = job.train(model, 1)
    assert job.train(model, 1).json == first.json
    refused(job.train(model, 1, ROW[::-1]), "already used", "use a new one")
    refused(job.step(model, 1), "already used")
    logprobs = job.wait(first).logprobs()
    assert job.wait(job.train(model, 1)).logprobs() == logprobs
    assert works(job, model, 2) == logprobs


def test_a_refused_call_leaves_no_gap(job: HttpClient, model: str):
    refused(job.step(model, 1, learning_rate=7.0))
    second = job.train(model, 2)
    refused(job.save(model, 3, "../out"))
    refused(job.load(model, 4, "tinker://nobody/weights/none"))
    fifth = job.train(model, 5)
    assert job.wait(second).logprobs() == job.wait(fifth).logprobs()
    # A refused one behind a gap is known when the gap closes.
    refused(job.step(model, 7, learning_rate=7.0))
    eighth = job.train(model, 8)
    works(job, model, 6)
    assert not job.wait(eighth).failed
    refused(job.train(model, 7), "is used up")


# -- checkpoints and versions ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["../../x", "..", "a/b", "/etc/passwd", ".hidden", "", "a\0b", "x" * 200])
def test_names_that_leave_the_owners_folder(pool: LocalPool, job: HttpClient, model: str, name: str):
    refused(job.save(model, 1, name))
    refused(job.publish(model, 2, name))
    for seq, path in enumerate((f"tinker://{model}/weights/{name}", f"tinker://{name}/weights/x"), 3):
        refused(job.load(model, seq, path))
        refused(job.load_new(path))
        refused(job.ask_sampler(path=path.replace("weights", "sampler_weights")))
    works(job, model, 5)
    assert not list(pool.root.glob("**/x"))


def test_checkpoints_that_are_not_there(job: HttpClient, service: tinker.ServiceClient, model: str):
    refused(job.load(model, 1, f"tinker://{model}/weights/none"), "no checkpoint", "who saved them")
    refused(job.load_new(f"tinker://{model}/weights/none"), "no checkpoint")
    refused(job.ask_sampler(path=f"tinker://{model}/sampler_weights/none"), "no published version", "Publish it")
    with pytest.raises(tinker.BadRequestError, match="no checkpoint"):
        service.create_training_client_from_state(f"tinker://{model}/weights/none").result()


def test_a_checkpoint_of_another_kind_of_model(job: HttpClient, model: str):
    path = job.wait(job.save(model, 1, "rank8")).json["path"]
    small, other = job.model(rank=4), job.model("short")
    failed(job, job.load(small, 1, path), "Create the model with the rank")
    refused(job.load(other, 1, path), "is of 'tiny', not of 'short'", "Load it there")
    works(job, small, 2)
    works(job, other, 2)
    for name in (small, other):
        job.unload(name)


def test_a_checkpoint_is_not_overwritten_unasked(job: HttpClient, model: str):
    saved = [job.save(model, 1, "once"), job.save(model, 2, "once")]
    refused(saved[1], "exists", "Pass overwrite, or another name")
    assert not job.wait(saved[0]).failed
    refused(job.save(model, 3, "once"), "exists")
    assert not job.wait(job.save(model, 4, "once", overwrite=True)).failed


def test_a_version_is_immutable(job: HttpClient, model: str):
    path = job.wait(job.publish(model, 1, "v")).json["path"]
    sampler = job.sampler(path=path)
    before = job.wait(job.sample(sampler, 1, seed=3))
    works(job, model, 2)
    job.wait(job.step(model, 3, learning_rate=0.5))
    refused(job.publish(model, 4, "v"), "published already", "another name")
    assert job.wait(job.sample(sampler, 2, seed=3)).body == before.body


def test_a_version_outlives_its_model(job: HttpClient):
    """And one that is gone for good is refused: it was deleted, and nobody samples from it."""
    for rank in (8, None):
        model = job.model(rank=rank)
        path = job.wait(job.publish(model, 1, "v")).json["path"]
        sampler = job.sampler(path=path)
        before = job.wait(job.sample(sampler, 1, seed=3))
        job.unload(model)
        assert job.wait(job.sample(sampler, 2, seed=3)).body == before.body
        assert job.wait(job.sample(job.sampler(path=path), 1, seed=3)).body == before.body


# -- ends --------------------------------------------------------------------------------------------------------------


def test_use_after_unload(job: HttpClient, service: tinker.ServiceClient):
    model = job.model()
    job.unload(model)
    refused(job.train(model, 1), "is gone: unloaded", "no checkpoint was saved")
    refused(job.post("get_info", model_id=model, type="get_info"), "is gone")
    assert job.wait(job.post("unload_model", model_id=model, type="unload_model")).status == 200
    trainer = service.create_lora_training_client("tiny", rank=8).result()
    job.unload(trainer.get_info().model_id)
    with pytest.raises(tinker.BadRequestError, match="is gone: unloaded"):
        trainer.forward_backward([_good_datum()], "cross_entropy").result()


def test_unloading_in_the_middle_of_a_call(job: HttpClient, model: str):
    """Neither the rest of the worker group nor its memory suffers from a call that was half done or waited."""
    cancelled = 0
    for turn in (1, 2, 3):
        doomed = job.model()
        calls = [job.train(doomed, seq, [1] * 128, rows=40) for seq in (1, 2, 3)]
        behind = job.train(model, turn)
        job.unload(doomed)
        for ended in map(job.wait, calls):
            cancelled += ended.failed
            assert not ended.failed or "cancelled" in ended.detail or "ended: unloaded" in ended.detail
        assert not job.wait(behind).failed
    assert cancelled
    works(job, model, 4)


def test_a_cancelled_sample(job: HttpClient):
    sampler = job.sampler(base="tiny")
    calls = [job.sample(sampler, seq, max_tokens=120, samples=16) for seq in range(1, 6)]
    for call in calls:
        assert job.post("cancel_future", request_id=call.json["request_id"]).status == 200
    for call in calls:
        ended = job.wait(call)
        assert not ended.failed or "cancelled" in ended.detail
    assert not job.wait(job.sample(sampler, 9)).failed
    assert job.post("cancel_future", request_id="nobody:1").status == 410


def test_more_open_calls_than_allowed(job: HttpClient, model: str):
    answers = [job.train(model, seq) for seq in range(70, 1, -1)]
    assert {answer.status for answer in answers} == {200, 429}
    assert "64 calls open" in answers[-1].detail
    accepted = [answer for answer in answers if answer.status == 200]
    assert len(accepted) == 64
    failed(job, accepted[0], "never came")
    works(job, model, 71)


# -- the key, the port, the file ---------------------------------------------------------------------------------------


def test_a_forged_key(job: HttpClient):
    for key in ("", "tml-forged", job.key[:-1], job.key + "x"):
        answer = job.ask("GET", "/api/v1/get_server_capabilities", {}, b"", key=key)
        assert (answer.status, "API key" in answer.detail) == (401, True)


def test_a_second_pool_of_the_same_name(pool: LocalPool, job: HttpClient, model: str):
    """Its head finds the address in use and says so; the first one goes on."""
    live = pool.live()
    done = pool.plexrl("pool", "head", "test", "--nodes", "1", "--allocated-us", "1", check=False)
    assert done.returncode != 0
    assert "is in use" in done.stderr and "End the process that listens there" in done.stderr, done.stderr
    assert pool.live() == live
    works(job, model, 1)


def test_a_port_in_use():
    import zmq

    from plexrl.types import Unavailable
    from plexrl.wire.channel import Server
    from plexrl.wire.keys import Keys

    async def listen(port: int) -> None:
        context = zmq.Context()
        try:
            Server(context, f"tcp://127.0.0.1:{port}", Keys.generate())
        finally:
            context.destroy(linger=0)

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(Unavailable, match="Choose another port, or 0"):
            asyncio.run(listen(taken.getsockname()[1]))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"gpus": 2}, ("gpus", "unknown key", "Keys here")),
        ({"limits": {"sequence_gapp": "1s"}}, ("limits.sequence_gapp", "Did you mean `sequence_gap`")),
        ({"device": {"bytes": "many"}}, ("device.bytes", "is not a size", "128MiB")),
        ({"scheduler": {"order": "best"}}, ("scheduler.order", "not a known value", "fifo")),
        ({"state_dir": "state"}, ("state_dir", "not an absolute path")),
        ({"models": {"tiny": {"path": "/nowhere"}}}, ("models.tiny.path", "no folder that this user can see")),
        ({"models": {}}, ("models", "Give at least one entry")),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_faults_in_plexrl_yaml(pool: LocalPool, tmp_path: Path, change: dict, words: tuple[str, ...]):
    file = tmp_path / "plexrl.yaml"
    file.write_text(yaml.safe_dump({**pool.config, **change}))
    check = [sys.executable, "-m", "plexrl.cli.main", "config", "check", str(file)]
    for done in (
        pool.plexrl("pool", "declare", "other", "--private", "--config", str(file), check=False),
        subprocess.run(check, capture_output=True, text=True, check=False),
    ):
        assert done.returncode == 2
        assert f"{file}:" in done.stderr
        for word in words:
            assert word in done.stderr.replace("\n", " ")
    assert not (pool.registry / "other.json").exists()


def _good_datum() -> types.Datum:
    return types.Datum(
        model_input=types.ModelInput.from_ints([1, 2]),
        loss_fn_inputs={"target_tokens": [2, 3], "weights": [1.0, 1.0]},
    )
