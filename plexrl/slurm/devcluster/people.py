"""The accounts of a development cluster: one service account, three users, three research accounts with shares."""

import os
import pwd
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

from plexrl.types import BadInput, Unavailable

SERVICE = "plexrl"
USERS = {"alice": "ml", "bob": "bio", "carol": "chem"}
SHARES = {"ml": 50, "bio": 30, "chem": 20}

_NO_SUCH_USER = 6  # userdel's exit code


def make_os_users(homes: Path) -> list[str]:
    """Create the OS users that do not exist yet (home directories below `homes`); returns those made now."""
    made = []
    for name in (SERVICE, *USERS):
        try:
            uid = pwd.getpwnam(name).pw_uid
        except KeyError:
            command = ["useradd", "--no-create-home", "--home-dir", str(homes / name), "--shell", "/bin/bash"]
            command += ["--user-group", "--comment", "PlexRL development cluster", name]
            done = subprocess.run(command, capture_output=True, text=True, timeout=30)
            if done.returncode:
                raise Unavailable(f"useradd {name} failed: {done.stderr.strip()}", "Create the user by hand") from None
            made.append(name)
        else:
            if uid == 0:
                raise BadInput(f"{name} is uid 0 here", "PlexRL's service account and users must be unprivileged")
    return made


def remove_os_users(names: Sequence[str]) -> list[str]:
    """Remove users; returns those that are kept because processes of theirs run."""
    kept = []
    for name in names:
        done = subprocess.run(["userdel", name], capture_output=True, timeout=30)
        if done.returncode not in (0, _NO_SUCH_USER):
            kept.append(name)
    return kept


def make_homes(homes: Path) -> None:
    """A home of mode 0700 for each."""
    homes.mkdir(mode=0o755, exist_ok=True)
    for name in (SERVICE, *USERS):
        home = homes / name
        home.mkdir(mode=0o700, exist_ok=True)
        entry = pwd.getpwnam(name)
        os.chown(home, entry.pw_uid, entry.pw_gid)


def make_associations(sacctmgr: Callable[..., str], cluster: str) -> None:
    """Bring slurmdbd to: accounts with shares, users in them, the service account an Operator. Idempotent."""
    have = set(sacctmgr("-nP", "show", "assoc", f"cluster={cluster}", "format=account,user").split())
    for account in (SERVICE, *SHARES):
        if f"{account}|" not in have:
            shares = f"fairshare={SHARES.get(account, 1)}"
            about = (f"description={account}", "organization=plexrl")
            sacctmgr("-i", "add", "account", account, f"cluster={cluster}", shares, *about)
    for user, account in {SERVICE: SERVICE, **USERS}.items():
        if f"{account}|{user}" not in have:
            level = ["adminlevel=Operator"] if user == SERVICE else []
            sacctmgr("-i", "add", "user", user, f"account={account}", f"cluster={cluster}", "fairshare=1", *level)
