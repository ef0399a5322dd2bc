"""The proxy against a head over the real channel: what it lets in, what it carries, how it holds."""

import asyncio

import httpx
import pytest

from plexrl.types import BadInput, Unavailable
from tests.unit.attach.fakehead import QUICK, SECRET, FakeHead, new_pool, proxy, until

LONG = type(QUICK)()


def hold(request, body):
    """Leave everything open."""


def run(scenario):
    with new_pool() as pool:
        asyncio.run(scenario(pool))


def test_a_request_arrives_whole_and_without_the_key():
    async def scenario(pool):
        FakeHead(pool, "one")
        async with proxy(pool) as running:
            answer = await running.client.post(
                "/api/v1/forward_backward?x=1%2F2",
                content=b"\x00\xff" * 100_000,
                headers={"content-type": "application/x-protobuf", "X-Idempotency-Key": "k"},
            )
            told = answer.json()
            assert answer.status_code == 200 and told["method"] == "POST"
            assert told["path"] == "/api/v1/forward_backward?x=1%2F2"
            assert told["body"] == "\x00\xff" * 100_000
            assert told["headers"]["content-type"] == "application/x-protobuf"
            assert told["headers"]["x-idempotency-key"] == "k"
            assert SECRET not in str(told) and "host" not in told["headers"]

    run(scenario)


@pytest.mark.parametrize(
    "headers", [{"x-api-key": "tml-forged"}, {"authorization": "Bearer tml-forged"}, {"x-api-key": ""}]
)
def test_a_forged_secret_is_refused(headers):
    async def scenario(pool):
        head = FakeHead(pool, "one")
        async with proxy(pool) as running, httpx.AsyncClient() as stranger:
            url = f"http://127.0.0.1:{running.port}/api/v1/get_info"
            answer = await stranger.post(url, headers=headers, content=b"x" * 300_000)
            assert answer.status_code == 401 and "API key" in answer.json()["detail"]
            assert head.requests == []

    run(scenario)


def test_the_bearer_form_of_the_secret_is_taken():
    async def scenario(pool):
        FakeHead(pool, "one")
        async with proxy(pool) as running, httpx.AsyncClient() as client:
            url = f"http://127.0.0.1:{running.port}/api/v1/healthz"
            answer = await client.get(url, headers={"Authorization": f"Bearer {SECRET}"})
            assert answer.json()["path"] == "/api/v1/healthz"

    run(scenario)


def test_a_body_above_the_pools_limit_is_413_and_the_connection_lives():
    async def scenario(pool):
        head = FakeHead(pool, "one", body_bytes=1000)
        async with proxy(pool) as running:
            answer = await running.client.post("/api/v1/asample", content=b"x" * 5_000_000)
            assert answer.status_code == 413 and "1000 bytes" in answer.json()["detail"]
            assert head.requests == []
            assert (await running.client.post("/api/v1/asample", content=b"x" * 1000)).status_code == 200

    run(scenario)


def test_without_a_head_each_kind_is_held_and_answered_in_its_own_way():
    async def scenario(pool):
        head = FakeHead(pool, "one")
        async with proxy(pool) as running:
            head.die()
            poll, submit, create, beat = await asyncio.gather(
                running.post("retrieve_future", request_id="m:train:0:3"),
                running.post("optim_step", model_id="m"),
                running.post("create_model", session_id="s"),
                running.post("session_heartbeat", session_id="s"),
            )
            assert poll.status_code == 408
            assert poll.json()["type"] == "try_again" and poll.json()["request_id"] == "m:train:0:3"
            assert "no head of pool 'lab'" in poll.json()["queue_state_reason"]
            assert submit.status_code == 402 and "no head of pool 'lab'" in submit.json()["detail"]
            for answer in (create, beat):
                assert answer.status_code == 429 and answer.headers["retry-after-ms"] == "1000"
                assert "no head of pool 'lab'" in answer.json()["detail"]

    run(scenario)


def test_a_poll_that_a_silent_head_forgets_is_asked_again():
    async def scenario(pool):
        FakeHead(pool, "one", respond=hold)
        async with proxy(pool) as running:
            assert (await running.post("retrieve_future", request_id="r")).status_code == 408

    run(scenario)


def test_a_new_head_elsewhere_gets_a_hello_and_what_was_open():
    async def scenario(pool):
        first = FakeHead(pool, "one", respond=hold)
        async with proxy(pool, holds=LONG) as running:
            posts = [asyncio.create_task(running.post("optim_step", seq_id=seq)) for seq in range(5)]
            await until(lambda: len(first.requests) == 5)
            first.die()
            late = asyncio.create_task(running.post("optim_step", seq_id=5))
            await asyncio.sleep(0.2)
            second = FakeHead(pool, "two")
            answers = await asyncio.gather(*posts, late)
            assert [answer.status_code for answer in answers] == [200] * 6
            assert len(second.hellos) == 1
            numbers = [request.id for request, _ in second.requests]
            assert numbers == sorted(numbers), "what was open must be sent again in its own order"

    run(scenario)


def test_a_head_that_was_only_away_is_found_again_at_the_same_address():
    async def scenario(pool):
        first = FakeHead(pool, "one", respond=hold)
        async with proxy(pool, holds=LONG) as running:
            post = asyncio.create_task(running.post("optim_step", seq_id=1))
            await until(lambda: first.requests)
            first.die()
            while True:  # until the library's thread has let go of the address
                try:
                    FakeHead(pool, "one")  # same address and nonce, another key
                    break
                except Unavailable:
                    await asyncio.sleep(0.01)
            assert (await post).status_code == 200

    run(scenario)


def test_a_head_that_forgot_us_is_greeted_again():
    async def scenario(pool):
        head = FakeHead(pool, "one")
        async with proxy(pool) as running:
            head.welcomed.clear()
            answers = await asyncio.gather(*(running.post("optim_step", seq_id=seq) for seq in range(10)))
            assert [answer.status_code for answer in answers] == [200] * 10
            assert len(head.hellos) == 2

    run(scenario)


def test_a_refusal_by_the_next_head_reaches_the_program():
    async def scenario(pool):
        head = FakeHead(pool, "one", respond=hold)
        async with proxy(pool, holds=LONG) as running:
            waiting = asyncio.create_task(running.post("optim_step", seq_id=1))
            await until(lambda: head.requests)
            head.die()
            second = FakeHead(pool, "two", refuse="its licence is gone")
            for answer in (await waiting, await running.post("optim_step", seq_id=2)):
                assert answer.status_code == 403 and "its licence is gone" in answer.json()["detail"]
            assert second.requests == []

    run(scenario)


def test_a_head_that_cannot_tell_yet_is_waited_for_like_no_head():
    async def scenario(pool):
        head = FakeHead(pool, "one")
        async with proxy(pool) as running:
            head.refuse, head.later = "slurmctld does not answer", True
            head.welcomed.clear()
            answer = await running.post("optim_step", seq_id=1)
            assert answer.status_code == 402 and "slurmctld does not answer" in answer.json()["detail"]
            head.refuse = ""
            while (await running.post("optim_step", seq_id=1)).status_code == 402:
                pass

    run(scenario)


def test_a_head_that_never_can_tell_is_named_when_the_start_ends():
    async def scenario(pool):
        FakeHead(pool, "one", refuse="slurmctld does not answer", later=True)
        with pytest.raises(Unavailable, match="slurmctld does not answer"):
            async with proxy(pool, deadline=0.5):
                raise AssertionError("admitted")

    run(scenario)


def test_the_first_refusal_ends_the_start():
    async def scenario(pool):
        FakeHead(pool, "one", refuse="the job holds a GPU")
        with pytest.raises(BadInput, match="pool 'lab' refused this job: the job holds a GPU"):
            async with proxy(pool):
                raise AssertionError("admitted")

    run(scenario)


@pytest.mark.parametrize(("state", "reason"), [("starting", "it is starting"), (None, "it is down")])
def test_no_head_within_the_deadline_ends_the_start(state, reason):
    async def scenario(pool):
        if state:
            pool.registry.publish(pool.live("one", f"ipc://{pool.folder}/x", "k" * 40, state=state))
        with pytest.raises(Unavailable, match=reason):
            async with proxy(pool, deadline=0.3):
                raise AssertionError("admitted")

    run(scenario)


def test_a_head_that_comes_within_the_deadline_is_waited_for():
    async def scenario(pool):
        async def late():
            await asyncio.sleep(0.2)
            return FakeHead(pool, "one")

        coming = asyncio.create_task(late())
        async with proxy(pool) as running:
            assert (await running.post("get_info")).status_code == 200
            assert (await coming).hellos

    run(scenario)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"server_key": "not z85"}, "server key"),
        ({"address": "gopher://nowhere"}, "cannot connect"),
        ({"service_uid": 12345}, "declared for uid"),
    ],
)
def test_a_damaged_live_file_ends_the_start(changes, reason):
    async def scenario(pool):
        pool.registry.publish(pool.live("one", "tcp://127.0.0.1:1", "k" * 40, **changes))
        with pytest.raises(BadInput, match=reason):
            async with proxy(pool):
                raise AssertionError("admitted")

    run(scenario)


def test_an_undeclared_pool_ends_the_start():
    async def scenario(pool):
        with pytest.raises(BadInput, match="not declared.*lab"):
            async with proxy(pool, pool="other"):
                raise AssertionError("admitted")

    run(scenario)


def test_the_lifeline_ends_the_proxy_with_a_word_to_the_head_and_open_requests_answered():
    async def scenario(pool):
        head = FakeHead(pool, "one", respond=hold)
        async with proxy(pool) as running:
            poll = asyncio.create_task(running.post("retrieve_future", request_id="r"))
            await until(lambda: head.requests)
            running.lifeline.close()
            await running.task
            assert (await poll).status_code == 408
            await until(lambda: head.byes == 1)

    run(scenario)
