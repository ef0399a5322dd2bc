"""The accounts of a development cluster: one service account, three users, three research accounts with shares."""

import os
import pwd
import subprocess
from collections.abc import Sequence
from pathlib import Path

from plexrl.types import BadInput, Unavailable

SERVICE = "plexrl"
USERS = {"alice": "ml", "bob": "bio", "carol": "chem"}
SHARES = {"ml": 50, "bio": 30, "chem": 20}

_USER_EXISTS = 9  # useradd's exit code


def make_os_users() -> list[str]:
    """Create the OS users that do not exist yet; returns those made now.

    Users belong to the machine, not to one directory: several development clusters share them.
    """
    made = []
    for name in (SERVICE, *USERS):
        try:
            uid = pwd.getpwnam(name).pw_uid
        except KeyError:
            command = ["useradd", "--create-home", "--shell", "/bin/bash", "--user-group"]
            command += ["--comment", "PlexRL development cluster", name]
            done = subprocess.run(command, capture_output=True, text=True, timeout=30)
            if done.returncode not in (0, _USER_EXISTS):  # another `up` may have been quicker
                raise Unavailable(f"useradd {name} failed: {done.stderr.strip()}", "Create the user by hand") from None
            if not done.returncode:
                made.append(name)
        else:
            if uid == 0:
                raise BadInput(f"{name} is uid 0 here", "PlexRL's service account and users must be unprivileged")
    return made


def remove_os_users(names: Sequence[str]) -> None:
    """Take back what make_os_users made; a user whom somebody uses by now stays."""
    for name in names:
        subprocess.run(["userdel", "--remove", name], capture_output=True, timeout=30)


def make_homes(homes: Path) -> None:
    """A working folder of mode 0700 for each in this cluster."""
    homes.mkdir(mode=0o755, exist_ok=True)
    for name in (SERVICE, *USERS):
        home = homes / name
        home.mkdir(mode=0o700, exist_ok=True)
        entry = pwd.getpwnam(name)
        os.chown(home, entry.pw_uid, entry.pw_gid)


def associations(cluster: str) -> str:
    """What `sacctmgr load` brings slurmdbd to: accounts with shares, users in them, the service account an Operator."""
    lines = [f"Cluster - '{cluster}':Fairshare=1", "Parent - 'root'"]
    for account in (SERVICE, *SHARES):
        shares = SHARES.get(account, 1)
        lines.append(f"Account - '{account}':Description='{account}':Organization='plexrl':Fairshare={shares}")
    for user, account in {SERVICE: SERVICE, **USERS}.items():
        level = ":AdminLevel='Operator'" if user == SERVICE else ""
        lines += [f"Parent - '{account}'", f"User - '{user}':DefaultAccount='{account}'{level}:Fairshare=1"]
    return "\n".join([*lines, ""])
