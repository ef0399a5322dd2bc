"""Who has had how much of the pool, measured by what is theirs: accounts with shares, and users within them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf, ldexp
from typing import NamedTuple

from plexrl.types import BadInput

HOUR_US = 3_600_000_000
LEAST = 0.125  # ours: below it a job of a heavy user would wait until the starvation bound decides alone
_LIMIT = 256  # half-lives until weights are scaled down again: 2^256 is far from a float's end


@dataclass(slots=True)
class _Node:
    """shares: raw. usage: GPU-microseconds times the weight of the moment when they were charged."""

    shares: float = 1.0
    usage: float = 0.0
    members: dict[str, "_Node"] = field(default_factory=dict)
    all_shares: float = 0.0  # sum over members

    def member(self, name: str) -> "_Node":
        node = self.members.get(name)
        if node is None:
            node = self.members[name] = _Node()
            self.all_shares += 1.0
        return node

    def scale(self, exponent: int) -> None:
        """Times a power of two: no digit is lost. What is less than a microsecond now is nothing."""
        usage = ldexp(self.usage, exponent)
        self.usage = usage if usage >= 1 else 0.0


class Standing(NamedTuple):
    """Where a user stands. shares, account_shares: raw. part: of the pool, by shares. usage_us: GPU-microseconds.

    used: the part of all usage. factor, level: as of `Shares`; next_factor: after one more GPU hour.
    """

    account: str
    user: str
    account_shares: float
    shares: float
    part: float
    usage_us: float
    used: float
    factor: float
    next_factor: float
    level: tuple[float, float]


class Shares:
    """A two-level tree of accounts and users with exponentially decayed usage.

    half_life_us: usage counts half after so long. Instead of decaying what is booked, what comes later weighs more, so
    that a charge is O(1). Who was not set has 1 share, and takes part from the first charge or question on. A `now`
    that goes backwards counts as the latest one seen.
    """

    def __init__(self, half_life_us: int) -> None:
        if half_life_us <= 0:
            raise BadInput(f"half-life of {half_life_us} us", "Give a time above zero")
        self._half_life_us = half_life_us
        self._root = _Node()
        self._now = 0
        self._epoch: int | None = None  # when a charge weighs 1

    def set(self, account: str, shares: float, users: Mapping[str, float]) -> None:
        """Give an account its shares, and these users theirs; other users of it have 1. Raises BadInput."""
        for name, value in {account: shares, **users}.items():
            if value != 0 and not 1e-6 <= value <= 1e9:
                raise BadInput(f"{value} shares for {name!r}", "Give zero, or 0.000001 to 1,000,000,000")
        node = self._root.member(account)
        node.shares = shares
        for name in users:
            node.member(name)
        for name, member in node.members.items():
            member.shares = users.get(name, 1.0)
        for parent in (self._root, node):
            parent.all_shares = sum(member.shares for member in parent.members.values())

    def charge(self, now: int, account: str, user: str, gpu_us: int) -> None:
        """Book GPU-microseconds that were used up to now."""
        amount = gpu_us * 2.0 ** self._age(now)
        node = self._root.member(account)
        self._root.usage += amount
        node.usage += amount
        node.member(user).usage += amount

    def usage(self, now: int, account: str, user: str) -> float:
        """The user's decayed usage, GPU-microseconds."""
        return self._root.member(account).member(user).usage * 2.0 ** -self._age(now)

    def factor(self, now: int, account: str, user: str) -> float:
        """Slurm's classic fair-share factor 2^(-effective usage / share), within [1/8, 1]; 1/8 for who has no share.

        Share and usage are normalised over the tree. The effective usage of an account is its usage; that of a user is
        U + (U of the account - U) * S / S of all siblings (Slurm's documentation, classic fair-share). Nobody has a
        usage while the whole tree's has decayed to less than a microsecond.
        """
        node = self._root.member(account)
        member = node.member(user)
        weight = 2.0 ** self._age(now)
        return self._factor(node, member, weight, 0.0)

    def _factor(self, node: _Node, member: _Node, weight: float, more: float) -> float:
        """more: usage of the member that is not booked. weight: of a microsecond now."""
        tree = self._root
        if not node.shares or not member.shares:
            return LEAST
        if (tree.usage + more) / weight < 1:
            return 1.0
        part = member.shares / node.all_shares
        effective = (member.usage + more + (node.usage - member.usage) * part) / (tree.usage + more)
        return max(LEAST, 2.0 ** (-effective * tree.all_shares / (part * node.shares)))

    def level(self, now: int, account: str, user: str) -> tuple[float, float]:
        """Share / usage of the account among accounts, then of the user in the account; higher first.

        As in Slurm's Fair Tree: no user of an account comes before any of an account with a higher value. Infinite
        without usage, 0 without share.
        """
        self._age(now)
        node = self._root.member(account)
        return _level(node, self._root), _level(node.member(user), node)

    def accounts(self) -> list[str]:
        """Those that take part."""
        return list(self._root.members)

    def tree(self, now: int) -> list[Standing]:
        """Every user of every account, in their order."""
        weight, tree = 2.0 ** self._age(now), self._root
        found = []
        for account, node in sorted(tree.members.items()):
            for user, member in sorted(node.members.items()):
                whole = node.all_shares * tree.all_shares
                found.append(
                    Standing(
                        account=account,
                        user=user,
                        account_shares=node.shares,
                        shares=member.shares,
                        part=member.shares * node.shares / whole if whole else 0.0,
                        usage_us=member.usage / weight,
                        used=member.usage / tree.usage if tree.usage else 0.0,
                        factor=self._factor(node, member, weight, 0.0),
                        next_factor=self._factor(node, member, weight, HOUR_US * weight),
                        level=(_level(node, tree), _level(member, node)),
                    )
                )
        return found

    def set_half_life(self, now: int, half_life_us: int) -> None:
        """Another half-life from now on; what is booked stays as it has decayed. Raises BadInput."""
        if half_life_us <= 0:
            raise BadInput(f"half-life of {half_life_us} us", "Give a time above zero")
        age = self._age(now)
        accounts = self._root.members.values()
        for node in (self._root, *accounts, *(member for each in accounts for member in each.members.values())):
            node.usage *= 2.0**-age
        self._half_life_us, self._epoch = half_life_us, self._now

    def _age(self, now: int) -> float:
        """Half-lives since the epoch; moves the epoch when they are many."""
        if self._epoch is None:
            self._epoch = now
            self._now = now
        self._now = max(self._now, now)
        age = self._now - self._epoch
        if age > _LIMIT * self._half_life_us:
            whole = age // self._half_life_us
            self._epoch += whole * self._half_life_us
            age -= whole * self._half_life_us
            for node in [self._root, *self._root.members.values()]:
                node.scale(-whole)
                for member in node.members.values():
                    member.scale(-whole)
        return age / self._half_life_us


def _level(node: _Node, parent: _Node) -> float:
    if not node.shares:
        return 0.0
    if not node.usage:
        return inf
    return node.shares * parent.usage / (parent.all_shares * node.usage)
