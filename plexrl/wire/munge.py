"""MUNGE credentials, through the `munge` and `unmunge` commands.

The payload goes in by stdin and never into argv. Both calls start a process and wait for it (about 5 ms): an event loop
calls them in a thread. The daemon's socket is an argument, else PLEXRL_MUNGE_SOCKET, else the system's own.
"""

import os
import shutil
import subprocess

from msgspec import Struct

from plexrl.types import BadInput, Unavailable

_TIMEOUT_S = 10


class Credential(Struct, frozen=True):
    """What munged vouches for: who made the credential, and the payload that they put in."""

    uid: int
    gid: int
    payload: bytes


def encode(payload: bytes, uid: int, ttl: int = 30, socket: str | None = None) -> str:
    """A credential that only the given uid can decode, good for ttl seconds.

    Without the restriction whoever it is shown to could pass it on in our name. Raises Unavailable without munged.
    """
    command = ["munge", *_socket(socket), f"--restrict-uid={uid}", f"--ttl={ttl}"]
    return _run(command, payload).stdout.decode("ascii").strip()


def decode(credential: str, socket: str | None = None) -> Credential:
    """Check a credential, once: munged refuses a second time.

    Raises BadInput for a forged, expired, replayed or foreign one, and for one that is not restricted to our own uid;
    Unavailable without munged.
    """
    try:
        raw = credential.encode("ascii")
    except UnicodeEncodeError as error:
        raise BadInput("the credential is no MUNGE credential", "Attach again") from error
    command = ["unmunge", *_socket(socket), "--numeric", "--keys=UID,GID,UID_RESTRICTION,LENGTH"]
    output = _run(command, raw).stdout
    # "KEY: value" lines, an empty line, then the payload as it is.
    head, _, payload = output.partition(b"\n\n")
    fields = dict(line.split(":", 1) for line in head.decode("utf-8", "replace").splitlines() if ":" in line)
    if int(fields.get("UID_RESTRICTION", "-1")) != os.geteuid():
        raise BadInput("the credential is not restricted to this pool's account", "Attach again with this release")
    return Credential(int(fields["UID"]), int(fields["GID"]), payload[: int(fields["LENGTH"])])


def _socket(socket: str | None) -> list[str]:
    socket = socket or os.environ.get("PLEXRL_MUNGE_SOCKET")
    return [f"--socket={socket}"] if socket else []


def _run(command: list[str], data: bytes) -> subprocess.CompletedProcess[bytes]:
    program = shutil.which(command[0])
    if program is None:
        raise Unavailable(f"the command {command[0]!r} is not there", "Install MUNGE (Debian: apt-get install munge)")
    try:
        done = subprocess.run(
            [program, *command[1:]],
            input=data,
            capture_output=True,
            timeout=_TIMEOUT_S,
            env={"LC_ALL": "C", "PATH": "/usr/bin:/bin"},
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise Unavailable(f"{command[0]} did not answer in {_TIMEOUT_S} s", "See whether munged is well") from error
    if done.returncode == 0:
        return done
    # munge explains on stderr, unmunge by its code alone.
    why = done.stderr.decode("utf-8", "replace").strip()
    why = why or _CODES.get(done.returncode, f"{command[0]} ended with {done.returncode}")
    if done.returncode in _DAEMON:
        raise Unavailable(why, "See whether munged runs on this node: munge -n | unmunge")
    raise BadInput(why, "Attach again; see whether clocks and MUNGE keys agree among the nodes")


# munge.h: EMUNGE_BAD_CRED, EMUNGE_CRED_INVALID, _EXPIRED, _REWOUND, _REPLAYED
_CODES = {
    8: "malformed credential",
    14: "invalid credential",
    15: "expired credential",
    16: "credential from the future",
    17: "replayed credential",
}
# EMUNGE_SNAFU, EMUNGE_NO_MEMORY, EMUNGE_SOCKET, EMUNGE_TIMEOUT
_DAEMON = (1, 5, 6, 7)
