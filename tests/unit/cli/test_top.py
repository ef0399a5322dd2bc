"""`plexrl top` and `plexrl logs`: one frame, and what is read of whose files. Real jobs' are tried in tests/slurm."""

import json
import os
import time
from pathlib import Path

import pytest
from rich.console import Console

from plexrl.cli.logs import _pool, _read
from plexrl.cli.top import frame, top
from plexrl.slurm.adapter import JobOutput
from plexrl.types import BadInput
from plexrl.wire.registry import Declared, Live, Registry

GANG = "tiny.lora.train.1/0"


@pytest.fixture
def registry(tmp_path: Path) -> str:
    """A pool that runs, with a job of ann's in its turn."""
    folder, state = tmp_path / "pools", tmp_path / "state"
    folder.mkdir(mode=0o755)
    (state / "run").mkdir(parents=True)
    (state / "logs").mkdir()
    books = Registry(str(folder), frozenset({os.getuid()}))
    books.declare(Declared(name="lab", kind="private", owner_uid=os.getuid(), config="/x", state_dir=str(state)))
    books.publish(
        Live(
            name="lab", instance="i", state="ready", address="ipc:///x", server_key="k" * 40, nonce="n",
            service_uid=os.getuid(), slurm_job=0, epoch="1-0-0",
        )
    )  # fmt: skip
    now_us = time.time_ns() // 1000
    job = {"user": "ann", "account": "ml", "open_calls": 3, "models": ["s1:train:0"], "explained": "Its turn is open."}
    gpus = {"n:0": {"turn": GANG, "phase": "open", "resident": []}, "n:1": {"turn": "", "phase": "", "resident": []}}
    (state / "run" / "status.json").write_text(json.dumps({"now_us": now_us, "gpus": gpus, "jobs": {"7.0": job}}))
    told = [
        {"now_us": now_us - 90_000_000, "gang": GANG, "what": "began", "reason": "next", "job": "6.0"},
        {"now_us": now_us - 5_000_000, "gang": GANG, "what": "began", "reason": "next", "job": "7.0"},
    ]
    (state / "run" / "decisions.jsonl").write_text("".join(json.dumps(each) + "\n" for each in told))
    return str(folder)


def test_a_frame_tells_who_is_on_which_gpu(registry, capsys):
    top(pool="", every=1, once=False, registry=registry, pool_uids="", as_json=True)
    seen = json.loads(capsys.readouterr().out)
    assert [(gpu["gpu"], gpu["job"]) for gpu in seen["gpus"]] == [("n:0", "7.0"), ("n:1", "")]
    assert (seen["turns_last_minute"], seen["open_calls"], seen["saved"]) == (1, 3, None)
    console = Console(width=160, record=True, file=open(os.devnull, "w"))
    console.print(frame(seen | {"saved": {"saved_gpu_seconds": 7200.0}}))
    text = console.export_text()
    assert "1 of 2 GPUs in turns, 3 open calls, 1 turns began in the last minute, saved so far: 2.00 GPU h" in text
    assert all(word in text for word in ("7.0", "ann", "s1:train:0", "Its turn is open.", GANG))


def test_it_shows_one_pool(registry):
    Registry(registry, frozenset({os.getuid()})).declare(
        Declared(name="other", kind="private", owner_uid=os.getuid(), config="/x", state_dir="/none")
    )
    with pytest.raises(BadInput, match="top shows one pool, and there are: lab, other"):
        top(pool="", every=1, once=True, registry=registry, pool_uids="", as_json=False)


def test_the_pools_lines_about_a_job(registry, tmp_path):
    state = tmp_path / "state"
    (state / "logs" / "head.log").write_text(
        "job 7.0 is over\njob 77.0 is over\nmodel s1:train:0 ended\nmodel s1:train:01 ended\n17.0 GiB\nfor job 7 was\n"
    )
    (state / "pool-3.out").write_text("nothing\n")
    declared = Registry(registry, frozenset({os.getuid()})).declared("lab")
    (found,) = _pool(declared, "7", 50)
    assert found["lines"] == ["job 7.0 is over", "model s1:train:0 ended", "for job 7 was"]
    assert next(_pool(declared, "7", 1))["lines"] == ["for job 7 was"]


def test_of_a_path_that_a_user_chose_only_that_users_plain_file_is_read(tmp_path):
    """Else root, who asks after a job, would print what its user may not read."""
    file = tmp_path / "out"
    file.write_text("one\ntwo\n")
    theirs = JobOutput(uid=os.getuid() + 1, stdout=file, stderr=file)
    mine = JobOutput(uid=os.getuid(), stdout=file, stderr=file)
    assert _read(file, mine, 1) == {"lines": ["two"], "error": ""}
    assert _read(file, mine, 0)["lines"] == ["one", "two"]
    assert _read(file, theirs, 1) == {"lines": [], "error": "no plain file of the job's user"}
    os.mkfifo(tmp_path / "pipe")
    assert _read(tmp_path / "pipe", mine, 1)["error"] == "no plain file of the job's user"
    assert "not there yet" in _read(tmp_path / "none", mine, 1)["error"]
