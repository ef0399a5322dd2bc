"""The helper and `plexrl attach` as processes, against a head in this one."""

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.unit.attach.fakehead import FakeHead, new_pool, until

CLEAN = {"PATH": "/usr/bin:/bin", "SLURM_JOB_ID": "41", "SLURM_RESTART_COUNT": "2"}
ASK = """
import os, urllib.request
request = urllib.request.Request(os.environ["TINKER_BASE_URL"] + "/api/v1/get_info", data=b"{}")
request.add_header("X-API-Key", os.environ["TINKER_API_KEY"])
print(urllib.request.urlopen(request).read().decode(), os.environ["NO_PROXY"])
"""


async def start(*command, env, pass_fds=()):
    return await asyncio.create_subprocess_exec(
        sys.executable, *command, env=env, pass_fds=pass_fds, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


async def helper(pool, *more, env=CLEAN):
    """Exit code, stdout, stderr and the writing end of the lifeline."""
    reading, writing = os.pipe()
    arguments = ("--registry", str(pool.folder), "--pool", "lab", "--lifeline", str(reading), "--deadline", "10")
    process = await start("-I", "-m", "plexrl.attach.helper", *arguments, *more, env=env, pass_fds=(reading,))
    os.close(reading)
    out, err = await process.communicate()
    return process.returncode, out.decode(), err.decode(), writing


def proxies(lifeline):
    """Process ids of the proxies that hold the other end of this lifeline."""
    pipe = os.readlink(f"/proc/self/fd/{lifeline}")
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if b"plexrl.attach.proxy" in (folder / "cmdline").read_bytes():
                if pipe in {os.readlink(fd) for fd in (folder / "fd").iterdir()}:
                    found.append(int(folder.name))
    return found


def test_the_helper_leaves_a_proxy_that_ends_with_the_lifeline():
    async def scenario(pool):
        head = FakeHead(pool, "one")
        code, out, err, lifeline = await helper(pool)
        assert (code, err) == (0, "")
        variables = dict(line.split("=", 1) for line in out.splitlines())
        assert set(variables) == {
            "TINKER_BASE_URL",
            "TINKER_API_KEY",
            "OPENAI_BASE_URL",
            "OPENAI_API_KEY",
            "NO_PROXY",
            "no_proxy",
            "SLURM_PLEXRL_POOL",
        }
        assert variables["SLURM_PLEXRL_POOL"] == "lab"
        assert variables["NO_PROXY"] == "127.0.0.1,localhost"
        assert re.fullmatch(r"tml-[\w-]{43}", variables["TINKER_API_KEY"])
        assert (head.hellos[0].job, head.hellos[0].restart, head.hellos[0].max_staleness) == (41, 2, None)
        (proxy,) = proxies(lifeline)
        shown = Path(f"/proc/{proxy}/cmdline").read_bytes() + Path(f"/proc/{proxy}/environ").read_bytes()
        assert variables["TINKER_API_KEY"].encode() not in shown
        assert os.getsid(proxy) == proxy
        assert {os.readlink(f"/proc/{proxy}/fd/{fd}") for fd in (0, 1, 2)} == {os.devnull}
        async with httpx.AsyncClient() as client:
            answer = await client.post(
                variables["OPENAI_BASE_URL"] + "/chat/completions",
                headers={"authorization": f"Bearer {variables['OPENAI_API_KEY']}"},
            )
            assert answer.status_code == 400 and "malformed JSON" in answer.json()["error"]["message"]
        os.close(lifeline)
        await until(lambda: not Path(f"/proc/{proxy}").exists())
        assert head.byes == 1

    with new_pool() as pool:
        asyncio.run(scenario(pool))


def test_sigterm_ends_the_proxy_in_order():
    async def scenario(pool):
        head = FakeHead(pool, "one")
        code, _, _, lifeline = await helper(pool, env=CLEAN | {"PLEXRL_MAX_STALENESS": "3"})
        assert code == 0 and head.hellos[0].max_staleness == 3
        (proxy,) = proxies(lifeline)
        os.kill(proxy, signal.SIGTERM)
        await until(lambda: head.byes == 1)
        await until(lambda: not Path(f"/proc/{proxy}").exists())
        os.close(lifeline)

    with new_pool() as pool:
        asyncio.run(scenario(pool))


@pytest.mark.parametrize(
    ("more", "env", "reason"),
    [
        (["--registry", "/nowhere/at/all"], CLEAN, r"the registry /nowhere/at/all does not exist"),
        (["--pool", "other"], CLEAN, r"pool 'other' is not declared .* declared pools: lab"),
        (["--pool", "../lab"], CLEAN, r"'\.\./lab' is no valid pool name"),
        (["--pool-uids", "x"], CLEAN, r"no list of uids"),
        (["--lifeline", "99"], CLEAN, r"lifeline"),
        (["--speed", "9"], CLEAN, r"unrecognized arguments: --speed 9"),
        ([], {"PATH": "/bin"}, r"SLURM_JOB_ID"),
        ([], CLEAN | {"PLEXRL_MAX_STALENESS": "-1"}, r"PLEXRL_MAX_STALENESS is '-1'\. Give how many"),
        ([], CLEAN, r"refused this job: no"),
    ],
)
def test_a_failure_prints_nothing_but_the_reason_and_exits_78(more, env, reason):
    async def scenario(pool):
        FakeHead(pool, "one", refuse="no")
        code, out, err, lifeline = await helper(pool, *more, env=env)
        assert (code, out) == (78, "")
        assert err.startswith("plexrl: ") and re.search(reason, err), err
        assert proxies(lifeline) == []
        os.close(lifeline)

    with new_pool() as pool:
        asyncio.run(scenario(pool))


def test_no_head_is_said_at_the_helpers_deadline():
    async def scenario(pool):
        code, out, err, lifeline = await helper(pool, "--deadline", "10")
        os.close(lifeline)
        assert (code, out) == (78, "") and "no head of pool 'lab': it is down" in err

    with new_pool() as pool:
        asyncio.run(scenario(pool))


def test_attach_runs_the_command_in_the_pool_and_hands_on_its_exit_code():
    async def scenario(pool):
        head = FakeHead(pool, "one")
        env = {"PATH": os.environ["PATH"], "PLEXRL_REGISTRY": str(pool.folder), "NO_PROXY": "site.example"}
        attach = ("-m", "plexrl.cli.main", "attach", "--pool", "lab", "--")
        process = await start(*attach, sys.executable, "-c", ASK, env=env)
        out, err = await process.communicate()
        assert process.returncode == 0, err
        told, no_proxy = out.decode().strip().rsplit(" ", 1)
        assert json.loads(told)["path"] == "/api/v1/get_info"
        assert no_proxy == "site.example,127.0.0.1,localhost"
        assert head.hellos[0].job == process.pid and head.byes == 1

        process = await start(*attach, "sh", "-c", "exit 7", env=env)
        await process.communicate()
        assert process.returncode == 7

    with new_pool() as pool:
        asyncio.run(scenario(pool))


def test_attach_passes_signals_on_and_tells_of_them_as_shells_do():
    async def scenario(pool):
        FakeHead(pool, "one")
        env = {"PATH": os.environ["PATH"], "PLEXRL_REGISTRY": str(pool.folder), "SLURM_PLEXRL_POOL": "lab"}
        process = await start(
            "-m", "plexrl.cli.main", "attach", "--", "sh", "-c", "echo started; exec sleep 60", env=env
        )
        assert await process.stdout.readline() == b"started\n"
        process.send_signal(signal.SIGTERM)
        await process.communicate()
        assert process.returncode == 128 + signal.SIGTERM

    with new_pool() as pool:
        asyncio.run(scenario(pool))


def test_attach_does_not_start_the_command_of_a_refused_job():
    async def scenario(pool):
        FakeHead(pool, "one", refuse="this pool is draining")
        env = {"PATH": os.environ["PATH"], "PLEXRL_REGISTRY": str(pool.folder), "SLURM_PLEXRL_POOL": "lab"}
        process = await start("-m", "plexrl.cli.main", "attach", "--", "echo", "started", env=env)
        out, err = await process.communicate()
        assert process.returncode != 0 and out == b"" and b"this pool is draining" in err

    with new_pool() as pool:
        asyncio.run(scenario(pool))


def test_the_proxy_imports_little():
    names = "torch", "pydantic", "tinker", "typer", "starlette", "yaml", "transformers", "numpy"
    code = f"import sys, plexrl.attach.proxy; print([name for name in {names!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
