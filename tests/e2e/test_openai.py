"""OpenAI's API on a private pool: what it says, over a change of the head, and when nobody listens any more."""

import json

from plexrl.types import records

from .localpool import finish
from .test_head_killed import kill_head

LOGPROB_BOUND = 1e-3
LONG = {"max_context": 2048, "sample": {"replicas": 1, "kv_bytes": 1 << 22, "max_batch": 4}}


def open_calls(pool) -> int:
    """Of all jobs, by the head's status."""
    status = json.loads((pool.state / "run" / "status.json").read_text())
    return sum(job["open_calls"] for job in status["jobs"].values())


def test_models_chats_completions_and_streams(local_pool):
    seen = local_pool().run("chatting.py")
    assert seen["models"] == ["tiny", seen["version"]]
    for name in ("tiny", seen["version"]):
        told = seen[name]
        assert told["same"] and told["tokens"] == [160, 160] and told["finish"] == ["length", "length"]
        assert told["chunks"] > 5  # two beginnings, two ends and the usage, and something between
    assert seen["prompt_tokens"][0] == seen["prompt_tokens"][1]
    assert seen["drawn_gap"] < LOGPROB_BOUND and seen["prompt_gap"] < LOGPROB_BOUND
    assert seen["stopped"] == ["", "stop"]
    assert seen["too_long"] == "context_length_exceeded"


def test_a_stream_goes_on_under_the_next_head(local_pool, tmp_path):
    pool = local_pool(model=LONG)
    program = pool.popen("streaming.py", str(tmp_path / "begun"))
    pool.wait_until("the stream has begun", (tmp_path / "begun").exists)
    kill_head(pool)
    seen = finish(program)
    assert seen["finish"] == "length" and seen["characters"] > 0


def test_a_stream_that_is_left_ends_its_call(local_pool, tmp_path):
    pool = local_pool(model=LONG)
    program = pool.popen("streaming.py", str(tmp_path / "begun"), str(tmp_path / "go"))
    pool.wait_until("the stream has begun", (tmp_path / "begun").exists)
    pool.wait_until("its call has ended", lambda: open_calls(pool) == 0)
    assert program.poll() is None
    (tmp_path / "go").touch()
    assert finish(program)["finish"] is None
    ended = [record for record in pool.records() if isinstance(record, records.CallEnded)]
    assert [record.error for record in ended] == ["the call was cancelled"]
