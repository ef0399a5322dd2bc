"""Budgets: GPU time that an account or a user may use in all, by plexrl.yaml or by Slurm's GrpTRESMins."""

import datetime
from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from plexrl.config import PoolConfig
from plexrl.pool.admission import Standing
from plexrl.pool.usage import Used
from plexrl.slurm.tree import line_of

_HOUR_S = 3600
_GPU = "gres/gpu"


class Line(Struct, frozen=True, kw_only=True):
    """One budget, in GPU-seconds. account, user: whose; a user's without account counts wherever the user works.

    pool_s: used of this pool; slurm_s: what slurmctld holds against it. source: where the budget is written.
    """

    account: str
    user: str
    limit_s: int
    pool_s: float
    slurm_s: int
    source: str

    @property
    def left_s(self) -> float:
        """What is left; below zero when more was used than allowed."""
        return self.limit_s - self.pool_s - self.slurm_s

    def __str__(self) -> str:
        whose = f"user {self.user!r}" if self.user else f"account {self.account!r}"
        if self.user and self.account:
            whose += f" in account {self.account!r}"
        told = f"the GPU budget of {whose} is used up: {self.source} allows {self.limit_s / _HOUR_S:.2f} GPU hours, "
        told += f"{self.pool_s / _HOUR_S:.2f} were used of this pool"
        return told + (f" and {self.slurm_s / _HOUR_S:.2f} in Slurm" if self.slurm_s else "")


def since_us(config: PoolConfig) -> int:
    """From when on the pool's ledger counts."""
    day = config.budgets.since
    if day is None:
        return 0
    return int(datetime.datetime.fromisoformat(day).replace(tzinfo=datetime.UTC).timestamp()) * 1_000_000


def lines(config: PoolConfig, standing: Standing, used: Mapping[Used, int]) -> list[Line]:
    """All budgets. used: GPU-microseconds since `since_us`."""
    budgets = config.budgets
    found = [
        Line(
            account=name,
            user="",
            limit_s=budget.gpu_time_us // 1_000_000,
            pool_s=_sum(used, lambda who, name=name: who.account == name),
            slurm_s=0,
            source=f"budgets.accounts.{name}",
        )
        for name, budget in budgets.accounts.items()
    ]
    found += [
        Line(
            account="",
            user=name,
            limit_s=budget.gpu_time_us // 1_000_000,
            pool_s=_sum(used, lambda who, name=name: who.user == name),
            slurm_s=0,
            source=f"budgets.users.{name}",
        )
        for name, budget in budgets.users.items()
    ]
    return found + (_of_slurm(standing, used) if budgets.from_slurm else [])


def _of_slurm(standing: Standing, used: Mapping[Used, int]) -> list[Line]:
    above = line_of(standing.associations)
    found = []
    for each in standing.associations:
        minutes = each.grp_tres_mins.get(_GPU, "")
        if not minutes.isdigit():
            continue

        def mine(who: Used, each=each) -> bool:
            if each.user:
                return (who.account, who.user) == (each.account, each.user)
            return each.account in above.get(who.account, (who.account,))

        found.append(
            Line(
                account=each.account,
                user=each.user,
                limit_s=60 * int(minutes),
                pool_s=_sum(used, mine),
                slurm_s=standing.used.get((each.account, each.user), 0),
                source="GrpTRESMins of its association in Slurm",
            )
        )
    return found


def exhausted(known: list[Line], standing: Standing, who: Any) -> Line | None:
    """The first budget that is used up and holds for a peer or a job."""
    above = line_of(standing.associations).get(who.account, (who.account,))
    for line in known:
        if line.left_s > 0:
            continue
        if line.user == who.user and line.account in ("", who.account):
            return line
        if not line.user and line.account in above:
            return line
    return None


def _sum(used: Mapping[Used, int], mine) -> float:
    return sum(amount for who, amount in used.items() if mine(who)) / 1e6
