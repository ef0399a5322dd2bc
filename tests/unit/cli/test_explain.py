"""`plexrl explain`: inside a job, as the pool's account, and as somebody who may not ask."""

import json
import os
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from typer.testing import CliRunner

from plexrl.cli.explain import app
from plexrl.types import BadInput, Unavailable
from plexrl.wire.registry import Declared, Registry

SAID = "Job 7.0 has 0 running and 1 waiting calls. Gang g/0 waits: since 3.0 s for n:0; gang h/0 has its turn."
KEY = "tml-key"


class Proxy(BaseHTTPRequestHandler):
    """Answers as a job's proxy does."""

    def do_GET(self) -> None:
        status, body = 200, {"job": "7.0", "explained": SAID}
        if self.headers["X-API-Key"] == "no head":
            status, body = 429, {"detail": "no head at the moment"}
        elif self.headers["X-API-Key"] != KEY:
            status, body = 401, {"detail": "the API key is not the one of this job's proxy"}
        elif self.path != "/plexrl/v1/explain":
            status, body = 404, {"detail": "unknown path"}
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, *args: object) -> None:
        """Silent."""


@pytest.fixture
def proxy() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), Proxy)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def explain(*arguments: str, **env: str):
    clear = dict.fromkeys(("TINKER_BASE_URL", "TINKER_API_KEY", "SLURM_JOB_ID", "PLEXRL_REGISTRY"))
    return CliRunner().invoke(app, list(arguments), env={**clear, **env})


@pytest.fixture
def registry(tmp_path: Path) -> Path:
    """Two pools of this uid, the second of which runs and has a job."""
    folder = tmp_path / "pools"
    folder.mkdir(mode=0o755)
    books = Registry(folder, frozenset({os.getuid()}))
    for name in ("down", "lab"):
        state = tmp_path / name
        (state / "run").mkdir(parents=True)
        books.declare(Declared(name=name, kind="site", owner_uid=os.getuid(), config="/x", state_dir=str(state)))
    tell(tmp_path / "lab", time.time())
    return folder


def tell(state: Path, now: float) -> None:
    status = {"now_us": int(now * 1e6), "jobs": {"7.0": {"explained": SAID}}}
    (state / "run" / "status.json").write_text(json.dumps(status))


def test_inside_a_job(proxy):
    env = {"TINKER_BASE_URL": proxy, "TINKER_API_KEY": KEY, "SLURM_JOB_ID": "7", "http_proxy": "http://127.0.0.1:1"}
    for arguments in ((), ("7",)):
        assert explain(*arguments, **env).output == f"{SAID}\n"
    assert json.loads(explain("--json", **env).output) == {"job": "7.0", "explained": SAID}


def test_inside_a_job_of_another_key_or_without_head(proxy):
    for key, kind in (("stolen", BadInput), ("no head", Unavailable)):
        assert isinstance(explain(TINKER_BASE_URL=proxy, TINKER_API_KEY=key).exception, kind)
    gone = explain(TINKER_BASE_URL="http://127.0.0.1:9", TINKER_API_KEY=KEY)
    assert isinstance(gone.exception, Unavailable)


def test_a_key_is_not_sent_to_other_hosts():
    shown = explain(TINKER_BASE_URL="https://tinker.example", TINKER_API_KEY=KEY)
    assert isinstance(shown.exception, BadInput) and "no job was named" in str(shown.exception)


def test_the_pools_account_asks_for_any_job(registry):
    for job in ("7", "7.0"):
        assert explain(job, "--registry", str(registry)).output == f"{SAID}\n"
    assert json.loads(explain("7", "--json", "--registry", str(registry)).output)["pool"] == "lab"


def test_what_was_said_long_ago_is_dated(registry):
    tell(registry.parent / "lab", time.time() - 100)
    assert "100 s ago" in explain("7", "--registry", str(registry)).output


def test_another_job_than_the_own_is_not_asked_of_the_proxy(proxy, registry):
    env = {"TINKER_BASE_URL": proxy, "TINKER_API_KEY": KEY, "SLURM_JOB_ID": "8"}
    assert explain("7", "--registry", str(registry), **env).output == f"{SAID}\n"


def test_a_job_that_is_not_there(registry):
    error = explain("9", "--registry", str(registry)).exception
    assert isinstance(error, BadInput) and "squeue -j 9" in str(error)


def test_others_are_told_whom_to_ask(registry, monkeypatch):
    monkeypatch.setattr("plexrl.cli.explain.os.getuid", lambda: 12345)
    error = explain("7", "--registry", str(registry)).exception
    assert isinstance(error, BadInput)
    assert "only root and the account of a pool" in str(error) and "inside the job" in str(error)
