"""`python -m bench.call [--json]`: what a call costs beside its work, through proxy, gateway, head and engine host.

The engine is `noop`; everything else is as in a real pool: a private one with one pretend GPU, the journal's fsync on.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path

import msgspec
import psutil

from bench.callclient import MODEL, Settings, say
from bench.localpool import LocalPool, end_in_order
from plexrl.types import BadInput, PlexrlError

MEMORY = ("tmpfs", "ramfs", "overlay", "devtmpfs")
DIGITS = {"calls_per_s": 0, "fsyncs": 0, "head_cpu_ms_per_call": 4}


def filesystem(folder: Path) -> str:
    """The type of the file system that a folder is on."""
    resolved = folder.resolve()
    mounts = [m for m in psutil.disk_partitions(all=True) if resolved.is_relative_to(m.mountpoint)]
    return max(mounts, key=lambda mount: len(mount.mountpoint)).fstype


def measure(settings: dict[str, int], folder: Path) -> dict[str, list[float]]:
    """Start a pool in the folder, attach the client, end the pool."""
    config = {
        "models": {
            MODEL: {
                "path": str(folder),
                "engine": "noop",
                "train": {"gpus": 1},
                "sample": {"replicas": 1, "kv_bytes": "1MiB"},
            },
        },
        "device": {"kind": "cpu", "bytes": "4MiB"},
        "host": {"bytes": "4MiB"},
    }
    say("starting a private pool")
    with LocalPool(folder, config) as pool:
        asked = Settings(
            **settings,
            head=pool.head().pid,
            status=str(pool.state / "run" / "status.json"),
            folder=str(folder),
        )
        return pool.measure("bench.callclient", msgspec.json.encode(asked).decode())


def main() -> int:
    """The command."""
    end_in_order()
    parser = argparse.ArgumentParser(prog="python -m bench.call", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--dir", type=Path, default=Path("/var/tmp"), help="folder on a real disk, for the journal")
    parser.add_argument("--rounds", type=int, default=5, help="figures are medians over rounds")
    parser.add_argument("--calls", type=int, default=400, help="calls per round, one in flight")
    parser.add_argument("--flood", type=int, default=4000, help="calls per round, many in flight")
    parser.add_argument("--in-flight", type=int, default=64)
    parser.add_argument("--sdk-calls", type=int, default=200, help="calls per round through the SDK")
    asked = vars(parser.parse_args())
    as_json, where = asked.pop("json"), asked.pop("dir")
    try:
        kind = filesystem(where)
        if kind in MEMORY:
            raise BadInput(f"{where} is on {kind}: an fsync there costs nothing", "Give --dir DIR on a real disk")
        with tempfile.TemporaryDirectory(prefix="plexrl-bench-", dir=where) as folder:
            os.chmod(folder, 0o755)
            rounds = measure(asked, Path(folder))
    except PlexrlError as error:
        print(f"bench.call: {error}", file=sys.stderr)
        return error.exit_code
    found: dict[str, object] = {
        name: round(statistics.median(values), DIGITS.get(name, 3)) for name, values in rounds.items()
    }
    found |= {"journal_fs": kind, "in_flight": asked["in_flight"], "flood": asked["flood"], "cores": os.cpu_count()}
    found["spread"] = {name: [round(f(values), 3) for f in (min, max)] for name, values in rounds.items()}
    if as_json:
        print(json.dumps(found))
    else:
        for name, value in found.items():
            print(f"{name:22} {value}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
