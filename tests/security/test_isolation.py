"""One pool, several users: what is another's can be neither seen, used nor harmed, nor told from what is not there."""

import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import psutil
import pytest

from plexrl.wire import messages
from tests.e2e.localpool import LocalPool, unprivileged
from tests.e2e.rawclient import Answer, RawClient
from tests.security.wirejob import Wire, WireJob

MIB = 1 << 20


class ManyUsersPool(LocalPool):
    """A private pool, but for who its jobs are of (manyusers.py)."""

    def command(self) -> list[str]:
        """What runs the pool."""
        return [*unprivileged(), sys.executable, "-m", "tests.security.manyusers", str(self.registry)]

    def head(self) -> psutil.Process:
        """The head's process."""
        assert self._process is not None
        return psutil.Process(self._process.pid)


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[LocalPool]:
    tiny = {
        "path": str(tiny_model),
        "max_context": 128,
        "sample": {"kv_bytes": 2 * MIB, "max_batch": 16},
        "lora": {"max_rank": 8, "slots": 1},
    }
    config = {
        "models": {
            "tiny": tiny,
            "heavy": {**tiny, "lora": {"max_rank": 512, "slots": 1}},
            "ours": {**tiny, "accounts": ["account7"]},
        },
        "device": {"kind": "cpu", "bytes": 64 * MIB},
        "host": {"bytes": 36 * MIB},
        "limits": {"session_timeout": "8s", "body_bytes": "1MiB"},
    }
    with ManyUsersPool(tmp_path_factory.mktemp("isolation"), config) as pool:
        yield pool


@pytest.fixture(scope="module")
def owner(pool: LocalPool) -> Iterator[WireJob]:
    """A job of uid 7."""
    job = WireJob(pool, 7001)
    yield job
    job.close()


@pytest.fixture(scope="module")
def stranger(pool: LocalPool) -> Iterator[WireJob]:
    """A job of uid 8."""
    job = WireJob(pool, 8001)
    yield job
    job.close()


@pytest.fixture(scope="module")
def sibling(pool: LocalPool) -> Iterator[WireJob]:
    """Another job of uid 7."""
    job = WireJob(pool, 7002)
    yield job
    job.close()


class Belongings:
    """What the owner has, all of it in use."""

    def __init__(self, owner: WireJob):
        self.owner = owner
        self.session = owner.session
        self.model = owner.model()
        self.future = owner.train(self.model, 1).json["request_id"]
        self.logprobs = owner.wait(self.future).logprobs()
        self.checkpoint = owner.wait(owner.save(self.model, 2, "mine")).json["path"]
        self.version = owner.wait(owner.publish(self.model, 3, "mine")).json["path"]
        self.sampler = owner.sampler(path=self.version)
        self.sampled = owner.sample(self.sampler, 1, seed=5).json["request_id"]
        self.drawn = owner.wait(self.sampled).body

    def untouched(self) -> None:
        """Everything is as it was, and goes on."""
        owner = self.owner
        assert owner.wait(self.future).logprobs() == self.logprobs
        assert owner.wait(owner.sample(self.sampler, 1, seed=5)).body == self.drawn
        twin = owner.wait(owner.load_new(self.checkpoint)).json["model_id"]
        assert owner.wait(owner.train(twin, 1, forward_only=True)).logprobs() == self.logprobs
        owner.unload(twin)


@pytest.fixture(scope="module")
def belongings(owner: WireJob) -> Belongings:
    return Belongings(owner)


ATTEMPTS: dict[str, Callable[[RawClient, Belongings], Answer]] = {
    "get_info": lambda job, its: job.post("get_info", model_id=its.model, type="get_info"),
    "train": lambda job, its: job.train(its.model, 4),
    "train its seq again": lambda job, its: job.train(its.model, 1),
    "step": lambda job, its: job.step(its.model, 4, learning_rate=1.0),
    "refused step": lambda job, its: job.step(its.model, 4, learning_rate=9.0),
    "save": lambda job, its: job.save(its.model, 4, "theirs"),
    "publish": lambda job, its: job.publish(its.model, 4, "theirs"),
    "load into it": lambda job, its: job.load(its.model, 4, its.checkpoint),
    "unload": lambda job, its: job.post("unload_model", model_id=its.model, type="unload_model"),
    "retrieve": lambda job, its: job.post("retrieve_future", request_id=its.future),
    "retrieve creation": lambda job, its: job.post("retrieve_future", request_id=f"{its.model}:0"),
    "retrieve sample": lambda job, its: job.post("retrieve_future", request_id=its.sampled),
    "cancel": lambda job, its: job.post("cancel_future", request_id=its.sampled),
    "sample": lambda job, its: job.sample(its.sampler, 9),
    "sample its seq again": lambda job, its: job.sample(its.sampler, 1, seed=5),
    "sampler": lambda job, its: job.ask("GET", f"/api/v1/samplers/{its.sampler}", {}, b""),
    "heartbeat": lambda job, its: job.post("session_heartbeat", session_id=its.session, type="session_heartbeat"),
    "finish": lambda job, its: job.post(f"sessions/{its.session}/finish", reason={"type": "errored"}),
    "model in its session": lambda job, its: job.ask_model(session_id=its.session),
    "its model again": lambda job, its: job.ask_model(session_id=its.session, model_seq_id=0),
    "sampler in its session": lambda job, its: job.post(
        "create_sampling_session",
        session_id=its.session,
        sampling_session_seq_id=99,
        base_model="tiny",
        type="create_sampling_session",
    ),
}
# These belong to a user, not to one job of theirs.
USERS: dict[str, Callable[[RawClient, Belongings], Answer]] = {
    "load": lambda job, its: job.load_new(its.checkpoint),
    "open version": lambda job, its: job.ask_sampler(path=its.version),
}


class Nothing:
    """The same kinds of names, of what was never there."""

    session = "s000000000000"
    model = f"{session}:train:0"
    future = f"{model}:1"
    checkpoint = f"tinker://{model}/weights/mine"
    version = f"tinker://{model}/sampler_weights/mine"
    sampler = f"{session}:sample:1"
    sampled = f"{sampler}:1"


def told(answer: Answer, its: object) -> tuple[int, str]:
    """Status and body, the names taken out."""
    text = answer.body.decode()
    for name in sorted(("checkpoint", "version", "sampled", "future", "sampler", "model", "session"), key=str):
        text = text.replace(getattr(its, name), f"<{name}>")
    return answer.status, re.sub(r"s[0-9a-f]{12}", "<session>", text)


@pytest.mark.parametrize("attempt", [*ATTEMPTS, *USERS])
def test_what_is_anothers_is_as_if_it_were_not(stranger: WireJob, belongings: Belongings, attempt: str):
    act = (ATTEMPTS | USERS)[attempt]
    answer = act(stranger, belongings)
    assert answer.status in (400, 404, 410), answer.body
    if attempt == "refused step":
        assert answer.json["detail"]  # refused for its learning rate, whosever the model is
    assert told(answer, belongings) == told(act(stranger, Nothing()), Nothing())


@pytest.mark.parametrize("attempt", ATTEMPTS)
def test_jobs_of_one_user_are_apart_too(sibling: WireJob, belongings: Belongings, attempt: str):
    answer = ATTEMPTS[attempt](sibling, belongings)
    assert answer.status in (400, 404, 410)
    assert told(answer, belongings) == told(ATTEMPTS[attempt](sibling, Nothing()), Nothing())


def test_a_users_next_job_may_use_their_checkpoints(sibling: WireJob, belongings: Belongings):
    model = sibling.wait(sibling.load_new(belongings.checkpoint)).json["model_id"]
    assert sibling.wait(sibling.train(model, 1, forward_only=True)).logprobs() == belongings.logprobs
    sampler = sibling.sampler(path=belongings.version)
    assert sibling.wait(sibling.sample(sampler, 1, seed=5)).body == belongings.drawn
    sibling.unload(model)


def test_afterwards_nothing_is_changed(stranger: WireJob, belongings: Belongings):
    for act in (ATTEMPTS | USERS).values():
        act(stranger, belongings)
    belongings.untouched()
    # Not even a seq_id of the owner's was used up.
    assert belongings.owner.wait(belongings.owner.train(belongings.model, 4)).logprobs() == belongings.logprobs


def test_paths_out_of_ones_own_folder(pool: LocalPool, stranger: WireJob, belongings: Belongings):
    run = belongings.model
    mangled = run.replace(":", "+")
    for path in (
        f"tinker://../7/{run}/weights/mine",
        f"tinker://..%2f7%2f{run}/weights/mine",
        f"tinker://../../7/{mangled}/weights/mine",
        f"tinker://{run}/../weights/mine",
        f"tinker://{run}/weights/../weights/mine",
        f"{pool.state}/checkpoints/7/{mangled}/weights/mine",
        f"file://{pool.state}/checkpoints/7/{mangled}/weights/mine",
    ):
        assert stranger.load_new(path).status == 400
        assert stranger.ask_sampler(path=path).status == 400
    own = stranger.model()
    for seq, name in enumerate((f"../../../7/{mangled}/weights/mine", "../mine", ".mine.meta"), 1):
        assert stranger.save(own, seq, name, overwrite=True).status == 400
    stranger.unload(own)
    belongings.untouched()


def test_the_pools_files_are_its_own(pool: LocalPool, belongings: Belongings):
    assert pool.state.stat().st_mode & 0o077 == 0
    for path in (pool.state / "run").iterdir():
        if path.suffix == ".json" and "key" in path.name or path.name in ("door.json", "inner.json"):
            assert path.stat().st_mode & 0o077 == 0, path


def test_a_base_model_for_another_account(owner: WireJob, stranger: WireJob):
    def listed(job: RawClient) -> set[str]:
        answer = job.ask("GET", "/api/v1/get_server_capabilities", {}, b"").json
        return {model["model_name"] for model in answer["supported_models"]}

    assert listed(owner) - listed(stranger) == {"ours"}
    unknown, theirs = stranger.ask_model("nowhere"), stranger.ask_model("ours")
    assert theirs.status == unknown.status == 400
    assert theirs.detail.replace("ours", "nowhere") == unknown.detail
    owner.unload(owner.model("ours"))


# -- memory ------------------------------------------------------------------------------------------------------------


def test_a_session_that_falls_silent_frees_its_memory(pool: LocalPool, owner: WireJob):
    """Two states of rank 512 do not fit the arena: the second fits when the first one's session is over."""
    silent = WireJob(pool, 9001)
    model = silent.model("heavy", 512)
    assert owner.wait(owner.ask_model("heavy", 512)).failed
    silent.fall_silent()
    deadline = time.monotonic() + 60
    while (ended := owner.wait(owner.ask_model("heavy", 512))).failed and time.monotonic() < deadline:
        time.sleep(0.5)
    assert not ended.failed, ended.body
    gone = silent.post("get_info", model_id=model, type="get_info")
    assert (gone.status, "its session ended (no heartbeat came)" in gone.detail) == (400, True)
    beat = silent.post("session_heartbeat", session_id=silent.session, type="session_heartbeat")
    assert beat.status == 410
    assert silent.ask_model().status == 410
    owner.unload(ended.json["model_id"])
    silent.close()


def test_a_killed_rank_gives_its_memory_back(pool: LocalPool, owner: WireJob, belongings: Belongings):
    """Full parameters: the group's processes are killed when the model goes; its memory is the next one's at once."""
    for _ in range(3):
        model = owner.model(rank=None)
        assert not owner.wait(owner.train(model, 1)).failed
        version = owner.wait(owner.publish(model, 2, "v")).json["path"]
        assert not owner.wait(owner.sample(owner.sampler(path=version), 1)).failed
        owner.unload(model)
    belongings.untouched()


# -- at the door -------------------------------------------------------------------------------------------------------


def until(holds: Callable[[], bool], timeout: float = 30.0) -> None:
    deadline = time.monotonic() + timeout
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_garbage_before_the_hello(pool: LocalPool, belongings: Belongings):
    wire = Wire(pool)
    pickled = b"\x80\x04\x95\x1a\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94\x8c\x06system\x94\x93\x94."
    deep = b"\x91" * 100_000 + b"\xc0"
    garbage = [[b""], [b"", b""], [b"\xff" * 100, b""], [b"{}", b"x"], [pickled, pickled], [deep, b""], [b"a"] * 50]
    for frames in garbage:
        wire.send(frames)
    until(lambda: len(wire.heard) == len(garbage))
    for frames in wire.heard:
        message, _ = messages.decode_from_head(frames)
        assert isinstance(message, messages.Refused) and message.why
    wire.heard.clear()
    for request in (
        messages.encode(messages.Request(7, "GET", "/api/v1/get_server_capabilities", {})),
        messages.encode(messages.Request(8, "POST", "/api/v1/get_info", {}), msgspec.json.encode({"model_id": "x"})),
    ):
        wire.send(request)
    until(lambda: len(wire.heard) == 2)
    answers = [messages.decode_from_head(frames)[0] for frames in wire.heard]
    assert [(answer.why, answer.id) for answer in answers] == [("say hello first", 7), ("say hello first", 8)]
    wire.send(messages.encode(messages.Bye()))
    wire.close()
    belongings.untouched()


def test_hellos_that_are_refused(pool: LocalPool):
    wire = Wire(pool)
    for hello, why in (
        (messages.Hello("other", "", 7003, 0), "this is pool 'test', not 'other'"),
        (messages.Hello("test", "", 666, 0), "Only a running job attaches"),
    ):
        wire.send(messages.encode(hello))
        until(lambda: bool(wire.heard))
        message, _ = messages.decode_from_head(wire.heard.pop())
        assert isinstance(message, messages.Refused) and why in message.why
    wire.close()


def test_a_stranger_cannot_fill_the_heads_memory(pool: LocalPool, belongings: Belongings):
    before = pool.head().memory_info().rss
    for _ in range(3):
        wire = Wire(pool)
        wire.send([b"x" * (96 * MIB), b""])
        until(lambda wire=wire: wire.falls > 0)
        wire.close()
    assert pool.head().memory_info().rss - before < 64 * MIB
    belongings.untouched()


def test_floods(pool: LocalPool, belongings: Belongings):
    """Of hellos, of garbage, of requests and of polls that are held: others are served in between."""
    floods = [Wire(pool) for _ in range(3)]
    floods[0].flood(messages.encode(messages.Hello("test", "", 666, 0)), 5000)
    floods[1].flood([b"\xff" * 50, b""], 5000)
    flooding = WireJob(pool, 8002)
    sampler = flooding.sampler(base="tiny")
    promise = flooding.sample(sampler, 1, max_tokens=100, samples=16).json["request_id"]
    poll = msgspec.json.encode({"request_id": promise})
    floods[2].send(messages.encode(messages.Hello("test", "", 8002, 0)))
    until(lambda: bool(floods[2].heard))
    floods[2].flood(messages.encode(messages.Request(1, "POST", "/api/v1/retrieve_future", {}), poll), 20_000)
    belongings.untouched()
    statuses = {messages.decode_from_head(frames)[0].status for frames in floods[2].heard[1:]}
    assert statuses <= {200, 429}
    for wire in floods:
        wire.close()
    flooding.close()
    belongings.untouched()
