"""Slurm's tree of associations in the pool's words: accounts and users with their shares, and who is above whom."""

from collections import defaultdict
from collections.abc import Iterable

from plexrl.slurm.adapter import Association

ROOT = "root"
_LEAST, _MOST = 1e-6, 1e9


def shares_of(associations: Iterable[Association]) -> dict[str, tuple[float, dict[str, float]]]:
    """Every account that has users: its shares of the pool, and its users' shares of the account.

    However deep the tree, an account's part of the whole is the product of its and its ancestors' parts of their
    siblings (Slurm's NormShares, without the users' own level); users beside sub-accounts take their part as siblings
    do. An account whose share is `parent` stands for its children, a user's `parent` counts as 1. Shares are in units
    of the average account, so that one which Slurm does not know (it has 1) is neither great nor small.
    """
    children: dict[str, list[Association]] = defaultdict(list)
    users: dict[str, list[Association]] = defaultdict(list)
    known = list(associations)
    accounts = {each.account for each in known if not each.user}
    for each in known:
        if each.user:
            users[each.account].append(each)
        elif each.account != ROOT:
            children[each.parent if each.parent in accounts else ROOT].append(each)
    parts: dict[str, float] = {}

    def below(name: str) -> tuple[list[Association], list[Association]]:
        """Accounts that share what `name` has, and users who do."""
        direct, people = [], list(users[name])
        for child in children[name]:
            if child.shares is None:
                more, others = below(child.account)
                direct += more
                people += others
            else:
                direct.append(child)
        return direct, people

    def descend(name: str, part: float) -> None:
        direct, people = below(name)
        own = sum(1.0 if each.shares is None else each.shares for each in people)
        whole = own + sum(each.shares for each in direct)
        for each in people:
            weight = 1.0 if each.shares is None else each.shares
            parts[each.account] = parts.get(each.account, 0.0) + (part * weight / whole if whole else 0.0)
        for child in direct:
            descend(child.account, part * child.shares / whole if whole else 0.0)

    descend(ROOT, 1.0)
    scale = len(parts)
    return {
        account: (
            _share(part * scale),
            {each.user: _share(1.0 if each.shares is None else each.shares) for each in users[account]},
        )
        for account, part in parts.items()
    }


def line_of(associations: Iterable[Association]) -> dict[str, tuple[str, ...]]:
    """Account -> itself and everything above it, the root last."""
    parents = {each.account: each.parent for each in associations if not each.user}
    found = {}
    for account in parents:
        line, at = [], account
        while at and at not in line:
            line.append(at)
            at = parents.get(at, "")
        found[account] = tuple(line)
    return found


def _share(value: float) -> float:
    return min(max(value, _LEAST), _MOST) if value else 0.0
