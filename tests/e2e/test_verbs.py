"""Everyday verbs on a real pool: from within a job, as the pool's account, and where there is nothing to see."""

import json
import subprocess
import sys


def ask(pool, *arguments: str):
    done = pool.plexrl(*arguments, check=False)
    return done.returncode, json.loads(done.stdout) if done.returncode == 0 else done.stderr


def test_verbs_inside_and_outside_of_a_job(local_pool, tmp_path):
    pool = local_pool()
    program = pool.popen("verbs.py", str(tmp_path))
    pool.wait_until("the program has asked", lambda: (tmp_path / "seen.json").exists() or program.poll() is not None)
    assert (tmp_path / "seen.json").exists(), program.communicate()
    seen = json.loads((tmp_path / "seen.json").read_text())
    job = f"{program.pid}.0"

    (queue,) = seen["queue"]["out"]
    assert (queue["pool"], queue["state"], queue["jobs_attached"]) == ("test", "ready", 1)
    assert [gpu["gpu"] for gpu in queue["gpus"]] == ["local:0"]
    (mine,) = seen["jobs"]["out"]
    assert (mine["job"], mine["state"], len(mine["models"])) == (job, "ATTACHED", 1) and job in mine["why"]
    first, second = seen["paths"]
    assert [each["path"] for each in seen["list"]["out"]] == [second, first]
    assert all(each["bytes"] > 0 and each["lora_rank"] == 8 for each in seen["list"]["out"])
    assert seen["delete"]["out"] == {"deleted": [first]}
    assert [each["path"] for each in seen["left"]["out"]] == [second]
    for refused in (seen["again"], seen["escape"]):
        assert refused["code"] == 2 and "there is no checkpoint" in refused["err"] and "of yours" in refused["err"]
    assert seen["loads"]

    code, ((shown),) = ask(pool, "queue", "--json")
    assert code == 0 and shown["jobs_attached"] == 1 and shown["gpus"][0]["gpu"] == "local:0"
    code, rows = ask(pool, "jobs", "--json")
    assert code == 0 and [row["job"] for row in rows] == [job]
    outside = [sys.executable, "-m", "plexrl.cli.main", "checkpoint", "list"]
    done = subprocess.run(outside, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "this is no job of a pool" in done.stderr
    code, error = ask(pool, "cancel", "1", "--pool", "test")
    assert code == 2 and "job 1 is not attached" in error
    assert pool.plexrl("cancel", str(program.pid), "--pool", "test").returncode == 0
    program.communicate(timeout=60)
    pool.wait_until("the job is gone", lambda: ask(pool, "jobs", "--json") == (0, []))
    assert ask(pool, "cancel", str(program.pid), "--pool", "test")[0] == 2
    pool.stop()
    code, ((shown),) = ask(pool, "queue", "--json")
    assert (code, shown["state"], shown["gpus"]) == (0, "down", None)
    code, error = ask(pool, "cancel", str(program.pid), "--pool", "test")
    assert code == 4 and "is down" in error
