"""Started once per job by the SPANK hook, under the user's uid: `python -I -m plexrl.attach.helper`.

Leaves the job's proxy running and prints the variables that the hook puts into the job's environment, as KEY=VALUE
lines. On any failure it prints nothing there, the reason on stderr, and exits 78: the job must not run unattached.
"""

import argparse
import os
import sys
import traceback

from plexrl.attach import launch
from plexrl.attach.settings import Settings
from plexrl.types import BadInput, PlexrlError

EXIT_CONFIG = 78


def main(arguments: list[str] | None = None) -> int:
    """Entry point; the exit code."""
    try:
        lines = attach(_parser().parse_args(arguments))
    except PlexrlError as error:
        print(f"plexrl: {error}", file=sys.stderr)
        return EXIT_CONFIG
    except Exception:
        traceback.print_exc()
        print("plexrl: the helper failed, see above", file=sys.stderr)
        return EXIT_CONFIG
    print("\n".join(f"{name}={value}" for name, value in lines.items()), flush=True)
    return 0


def attach(options: argparse.Namespace) -> dict[str, str]:
    """Start the proxy as the options and the job's SLURM_ variables say; the variables for the job."""
    secret = launch.new_secret()
    settings = Settings(
        pool=options.pool,
        registry=options.registry,
        pool_uids=_uids(options.pool_uids),
        job=_number("SLURM_JOB_ID", None),
        restart=_number("SLURM_RESTART_COUNT", "0"),
        secret=secret,
        lifeline=options.lifeline,
        munge_socket=options.munge_socket,
        max_staleness=launch.own_max_staleness(),
    )
    started = launch.start(settings, options.deadline)
    return launch.environment(started.port, secret, options.pool, launch.own_no_proxy())


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:
        raise BadInput(message, "Correct the arguments of the plugin in plugstack.conf")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="plexrl.attach.helper", description=__doc__, allow_abbrev=False)
    parser.add_argument("--registry", required=True, metavar="DIR", help="registry of pools")
    parser.add_argument("--pool", required=True, metavar="NAME", help="pool that the job asked for")
    parser.add_argument("--lifeline", required=True, type=int, metavar="FD", help="read end of a pipe to the task")
    parser.add_argument("--pool-uids", default="", metavar="UID,..", help="accounts, beside root, to be believed")
    parser.add_argument("--munge-socket", metavar="PATH", help="socket of munged, if not the system's")
    parser.add_argument("--deadline", type=float, default=45.0, metavar="S", help="seconds to be admitted in")
    return parser


def _uids(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(uid) for uid in text.split(",") if uid)
    except ValueError as error:
        raise BadInput(f"--pool-uids {text!r} is no list of uids", "Write pool_uids=UID,UID") from error


def _number(name: str, default: str | None) -> int:
    text = os.environ.get(name, default)
    if text is None or not text.isdigit():
        raise BadInput(f"{name} is {text!r}", "The helper must be started inside a Slurm job")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
