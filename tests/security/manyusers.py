"""Runs a pool whose admission takes a job's number for who it is: job 7001 is of uid 7, job 8001 of uid 8.

Everything behind the admission is the pool as it is. MUNGE and slurmctld, which say who somebody is at a site pool,
have their tests in tests/slurm. argv: registry.
"""

import subprocess
import sys
import time
from collections.abc import Iterable

import plexrl.pool.admission as admission
from plexrl.cli.main import app
from plexrl.types import BadInput, Peer
from plexrl.wire.messages import Hello


class ByNumber(admission.PrivateAdmission):
    """job // 1000 is the uid; 666 is not admitted."""

    async def admit(self, hello: Hello, client_key: str) -> Peer:
        """The peer, or BadInput."""
        if hello.job == 666:
            raise BadInput("job 666 is not RUNNING", "Only a running job attaches")
        uid = hello.job // 1000
        return Peer(uid=uid, user=f"user{uid}", account=f"account{uid}", job=f"{hello.job}.{hello.restart}")

    async def over(self, peers: Iterable[Peer]) -> dict[str, str]:
        """Nobody."""
        return {}


admission.PrivateAdmission = ByNumber
common = ["test", "--registry", sys.argv[1], "--allocated-us", str(time.time_ns() // 1000)]
agent = subprocess.Popen(
    [sys.executable, "-m", "plexrl.cli.main", "pool", "agent", *common, "--node", "local", "--gpus", "1"],
    start_new_session=True,
)
try:
    app(["pool", "head", *common, "--nodes", "1"], standalone_mode=False)
finally:
    agent.terminate()
    agent.wait()
