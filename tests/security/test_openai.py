"""Routes of our own for several users: versions, checkpoints and jobs are their user's alone, keys their job's."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import openai
import pytest

from plexrl.attach import launch
from plexrl.attach.settings import Settings
from tests.e2e.localpool import LocalPool, unprivileged
from tests.security.test_isolation import MIB, ManyUsersPool
from tests.security.wirejob import WireJob

TALK = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[LocalPool]:
    tiny = {"path": str(tiny_model), "max_context": 128, "sample": {"kv_bytes": 2 * MIB}, "lora": {"max_rank": 8}}
    models = {"tiny": tiny, "ours": {**tiny, "accounts": ["account7"]}}
    config = {"models": models, "device": {"kind": "cpu", "bytes": 64 * MIB}, "host": {"bytes": 128 * MIB}}
    with ManyUsersPool(tmp_path_factory.mktemp("openai"), config) as pool:
        yield pool


class Job:
    """A logical job with a proxy of its own, and the SDK as its program would use it."""

    def __init__(self, pool: LocalPool, job: int):
        self.lifeline, self._ours = os.pipe()
        self.secret = launch.new_secret()
        settings = Settings(
            pool="test",
            registry=str(pool.registry),
            pool_uids=(1000, os.getuid()),  # whom `unprivileged` makes us, and us
            job=job,
            restart=0,
            secret=self.secret,
            lifeline=self.lifeline,
        )
        self.process = subprocess.Popen(
            [*unprivileged(), sys.executable, "-I", "-m", "plexrl.attach.proxy"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=(self.lifeline,),
        )
        self.process.stdin.write(msgspec.json.encode(settings))
        self.process.stdin.close()
        with self.process.stdout:
            port = json.loads(self.process.stdout.readline())["port"]
        self.url = launch.environment(port, self.secret, "test", "")["OPENAI_BASE_URL"]
        self.client = openai.OpenAI(base_url=self.url, api_key=self.secret, max_retries=0)

    def close(self) -> None:
        """End the proxy with its lifeline."""
        self.client.close()
        os.close(self._ours)
        os.close(self.lifeline)
        self.process.wait(30)


@pytest.fixture(scope="module")
def jobs(pool: LocalPool) -> Iterator[tuple[Job, Job]]:
    """One of uid 7, one of uid 8."""
    with contextlib.ExitStack() as stack:
        found = []
        for number in (7001, 8001):
            found.append(Job(pool, number))
            stack.callback(found[-1].close)
        yield found[0], found[1]


@pytest.fixture(scope="module")
def version(pool: LocalPool) -> Iterator[str]:
    """Published by another job of uid 7."""
    job = WireJob(pool, 7002)
    model = job.model("tiny", 8)
    yield job.wait(job.publish(model, 1, "mine")).json["path"]
    job.close()


def test_a_version_is_its_users_in_all_of_their_jobs(jobs: tuple[Job, Job], version: str):
    owner, _ = jobs
    found = owner.client.chat.completions.create(model=version, messages=TALK, max_tokens=3)
    assert found.usage.completion_tokens == 3
    assert version in [model.id for model in owner.client.models.list()]


def test_a_strangers_version_is_as_if_it_were_not(jobs: tuple[Job, Job], version: str):
    _, stranger = jobs
    assert version not in [model.id for model in stranger.client.models.list()]
    missing = version.replace("mine", "none")
    told = []
    for name in (version, missing):
        refusals = []
        for stream in (False, True):
            with pytest.raises(openai.NotFoundError) as caught:
                stranger.client.chat.completions.create(model=name, messages=TALK, max_tokens=3, stream=stream)
            refusals.append((caught.value.status_code, caught.value.body))
        told.append(json.dumps(refusals).replace(name, "NAME"))
    assert told[0] == told[1]


def test_a_model_of_another_account_is_as_if_it_were_not(jobs: tuple[Job, Job]):
    owner, stranger = jobs
    assert owner.client.chat.completions.create(model="ours", messages=TALK, max_tokens=1).choices
    assert "ours" not in [model.id for model in stranger.client.models.list()]
    with pytest.raises(openai.NotFoundError):
        stranger.client.completions.create(model="ours", prompt="x")


def test_what_another_job_draws_cannot_be_read(pool: LocalPool, jobs: tuple[Job, Job]):
    owner, stranger = WireJob(pool, 7003), WireJob(pool, 8003)
    try:
        future = owner.sample(owner.sampler(base="tiny"), 1).json["request_id"]
        assert owner.wait(future).status == 200
        for name in (future, future + "0"):
            answer = stranger.ask("POST", "/plexrl/v1/drawn", {}, json.dumps({"request_id": name}).encode())
            assert answer.status == 410 and answer.detail.replace(name, "NAME").startswith("there is no request 'NAME'")
        mine = owner.ask("POST", "/plexrl/v1/drawn", {}, json.dumps({"request_id": future}).encode())
        assert mine.status == 200
    finally:
        owner.close()
        stranger.close()


def test_one_jobs_key_is_no_good_at_anothers_proxy(jobs: tuple[Job, Job]):
    owner, stranger = jobs
    with openai.OpenAI(base_url=owner.url, api_key=stranger.secret, max_retries=0) as client:
        for ask in (client.models.list, lambda: client.chat.completions.create(model="tiny", messages=TALK)):
            with pytest.raises(openai.AuthenticationError) as caught:
                ask()
            assert owner.secret not in str(caught.value.body) and stranger.secret not in str(caught.value.body)


def test_keys_stand_in_no_log_no_argv_no_environment_and_no_file(pool: LocalPool, jobs: tuple[Job, Job]):
    owner, _ = jobs
    with pytest.raises(openai.NotFoundError):
        owner.client.completions.create(model="nope", prompt="x")
    secret = owner.secret.encode()
    for process in (owner.process, pool.head(), *pool.processes("")):
        for name in ("cmdline", "environ"):
            assert secret not in Path(f"/proc/{process.pid}/{name}").read_bytes()
    files = [path for path in pool.root.rglob("*") if path.is_file()]
    assert files and not [path for path in files if secret in path.read_bytes()]


def test_checkpoints_and_jobs_are_told_to_their_user_only(pool: LocalPool):
    owner, sibling, stranger = WireJob(pool, 7004), WireJob(pool, 7005), WireJob(pool, 8004)

    def ask(job: WireJob, route: str, **body: object):
        raw = json.dumps(body).encode() if body else b""
        return job.ask("POST" if body else "GET", f"/plexrl/v1/{route}", {}, raw)

    try:
        model = owner.model("tiny", 8)
        path = owner.wait(owner.save(model, 1, "kept")).json["path"]
        assert path not in str(ask(stranger, "checkpoints").json)
        refused = ask(stranger, "checkpoints/delete", path=path)
        missing = ask(stranger, "checkpoints/delete", path=path.replace("kept", "none"))
        assert refused.status == missing.status == 404
        assert refused.detail.replace("kept", "none") == missing.detail
        escape = path.replace("tinker://", "tinker://../7/")
        assert ask(stranger, "checkpoints/delete", path=escape).status == 404
        assert (
            "7004.0" not in ask(stranger, "pool").body.decode() and "user7" not in ask(stranger, "pool").body.decode()
        )
        assert {"7004.0", "7005.0"} <= {job["job"] for job in ask(sibling, "pool").json["jobs"]}
        assert path in [each["path"] for each in ask(sibling, "checkpoints").json["checkpoints"]]
        assert ask(sibling, "checkpoints/delete", path=path).status == 200
        assert path not in str(ask(owner, "checkpoints").json)
    finally:
        for job in (owner, sibling, stranger):
            job.close()
