"""Shares and decayed usage: hand-worked numbers, and that neither the order nor the split of charges matters."""

from math import inf, isclose

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plexrl.scheduler.fairshare import LEAST, Shares
from plexrl.types import BadInput

DAY = 86_400_000_000
WEEK = 7 * DAY

names = st.sampled_from([("a", "u"), ("a", "v"), ("b", "u"), ("c", "w")])
share = st.just(0.0) | st.floats(1e-6, 1e9)
charges = st.lists(st.tuples(st.integers(0, 400 * DAY), names, st.integers(1, 10**15)), min_size=1, max_size=12)


def everything(shares: Shares, now: int) -> list[float]:
    """All figures of all four users."""
    who = [("a", "u"), ("a", "v"), ("b", "u"), ("c", "w")]
    for name in who:
        shares.factor(now, *name)  # all take part
    return [
        figure
        for name in who
        for figure in (shares.usage(now, *name), shares.factor(now, *name), *shares.level(now, *name))
    ]


def close(one: list[float], other: list[float]) -> bool:
    return all(isclose(a, b, rel_tol=1e-6, abs_tol=1) for a, b in zip(one, other, strict=True))


# ---- by hand


def test_two_accounts_that_use_their_share_get_one_half():
    shares = Shares(WEEK)
    for account in ("a", "b"):
        shares.charge(0, account, "u", 1000)
    assert shares.factor(0, "a", "u") == shares.factor(0, "b", "u") == 0.5
    assert shares.level(0, "a", "u") == (1, 1)


def test_one_account_uses_three_quarters():
    shares = Shares(WEEK)
    shares.charge(0, "a", "u", 750)
    shares.charge(0, "b", "u", 250)
    assert isclose(shares.factor(0, "a", "u"), 2**-1.5)
    assert isclose(shares.factor(0, "b", "u"), 2**-0.5)
    assert shares.level(0, "b", "u")[0] == 2 > shares.level(0, "a", "u")[0]


def test_a_user_pays_in_part_for_the_rest_of_the_account():
    shares = Shares(WEEK)
    shares.set("a", 40, {"u": 3, "v": 1})
    shares.set("b", 60, {})
    shares.charge(0, "a", "v", 300)
    shares.charge(0, "b", "w", 700)
    # u: share 0.4 * 3/4 = 0.3, effective usage 0 + (0.3 - 0) * 3/4 = 0.225
    assert isclose(shares.factor(0, "a", "u"), 2 ** (-0.225 / 0.3))
    # v: share 0.1, effective usage 0.3 + (0.3 - 0.3) * 1/4 = 0.3
    assert isclose(shares.factor(0, "a", "v"), LEAST)
    # w: share 0.6, usage 0.7
    assert isclose(shares.factor(0, "b", "w"), 2 ** (-0.7 / 0.6))
    assert shares.level(0, "a", "u") == (pytest.approx(4 / 3), inf)
    assert shares.level(0, "a", "v") == (pytest.approx(4 / 3), 0.25)


def test_usage_halves_in_a_half_life():
    shares = Shares(WEEK)
    shares.charge(0, "a", "u", 1000)
    assert shares.usage(WEEK, "a", "u") == 500
    shares.charge(WEEK, "b", "u", 500)
    assert shares.factor(WEEK, "a", "u") == shares.factor(WEEK, "b", "u") == 0.5


def test_nobody_used_anything():
    shares = Shares(WEEK)
    shares.set("a", 5, {"u": 2})
    assert shares.factor(0, "a", "u") == shares.factor(0, "new", "new") == 1
    assert shares.level(0, "a", "u") == (inf, inf)
    shares.charge(0, "a", "u", 10**6)
    assert shares.factor(0, "a", "u") < 1
    assert shares.factor(30 * WEEK, "a", "u") == 1  # 10^6 / 2^30


def test_no_share():
    shares = Shares(WEEK)
    shares.set("a", 0, {})
    shares.set("b", 1, {"u": 0, "v": 1})
    assert shares.factor(0, "a", "u") == shares.factor(0, "b", "u") == LEAST
    assert shares.factor(0, "b", "v") == 1
    shares.charge(0, "a", "u", 5)
    assert shares.factor(0, "a", "u") == LEAST
    assert shares.level(0, "a", "u") == (0, 1)
    assert shares.level(0, "b", "u") == (inf, 0)


def test_the_unknown_has_one_share():
    shares = Shares(WEEK)
    shares.set("a", 3, {})
    shares.charge(0, "b", "u", 100)
    shares.charge(0, "a", "u", 300)
    assert shares.factor(0, "a", "u") == shares.factor(0, "b", "u") == 0.5


def test_shares_may_change_and_usage_stays():
    shares = Shares(WEEK)
    shares.charge(0, "a", "u", 100)
    shares.charge(0, "b", "u", 100)
    shares.set("a", 3, {"u": 7, "v": 7})
    assert isclose(shares.factor(0, "a", "v"), 2 ** -((0 + 0.5 / 2) / (3 / 4 / 2)))
    shares.set("a", 1, {})
    assert shares.factor(0, "b", "u") == 0.5


@pytest.mark.parametrize("wrong", [-1.0, inf, 1e-300, float("nan")])
def test_shares_that_make_no_sense(wrong: float):
    shares = Shares(WEEK)
    with pytest.raises(BadInput, match="shares for 'a'"):
        shares.set("a", wrong, {})
    with pytest.raises(BadInput, match="shares for 'u'"):
        shares.set("a", 1, {"u": wrong})
    assert shares.factor(0, "a", "u") == 1
    with pytest.raises(BadInput, match="half-life"):
        Shares(0)


def test_time_does_not_go_backwards():
    shares = Shares(WEEK)
    shares.charge(10 * WEEK, "a", "u", 1000)
    shares.charge(0, "b", "u", 1000)
    assert shares.factor(0, "a", "u") == shares.factor(0, "b", "u") == 0.5
    assert shares.usage(0, "a", "u") == 1000


# ---- properties


@given(charges, st.integers(1, 7))
def test_the_split_of_a_charge_does_not_matter(made: list, parts: int):
    whole, split = Shares(WEEK), Shares(WEEK)
    made.sort(key=lambda charge: charge[0])
    for at, name, amount in made:
        whole.charge(at, *name, amount)
        for part in range(parts):
            split.charge(at, *name, amount // parts + (part < amount % parts))
    assert close(everything(whole, 400 * DAY), everything(split, 400 * DAY))


@given(st.lists(st.tuples(names, st.integers(1, 10**15)), min_size=1, max_size=12), st.randoms())
def test_the_order_of_charges_does_not_matter(made: list, random):
    one, other = Shares(WEEK), Shares(WEEK)
    for name, amount in made:
        one.charge(5, *name, amount)
    random.shuffle(made)
    for name, amount in made:
        other.charge(5, *name, amount)
    assert close(everything(one, DAY), everything(other, DAY))


@given(charges, st.sampled_from([60_000_000, DAY, WEEK]), share, share)
def test_the_factor_stays_within_its_bounds(made: list, half_life: int, account: float, user: float):
    shares = Shares(half_life)
    shares.set("a", account, {"u": user})
    for at, name, amount in sorted(made):
        shares.charge(at, *name, amount)
        assert all(LEAST <= shares.factor(at, *who) <= 1 for who in (("a", "u"), ("a", "v"), ("b", "u"), ("c", "w")))


@given(st.integers(1, 10**15), st.floats(10, 1000))
def test_ten_times_the_share_is_at_the_bound(amount: int, others: float):
    shares = Shares(WEEK)
    shares.set("a", 1, {})
    shares.set("b", others, {})
    shares.charge(0, "a", "u", amount)
    assert shares.factor(0, "a", "u") == LEAST


@given(charges, st.integers(1, 3))
def test_scaling_weights_down_changes_nothing(made: list, half_life: int):
    """Half-lives of hours over 400 days, so that weights overflow: the same as decaying what is booked, by hand."""
    half_life *= 3_600_000_000
    shares = Shares(half_life)
    made.sort(key=lambda charge: charge[0])
    usage = dict.fromkeys([name for _, name, _ in made], 0.0)
    now = made[0][0]
    for at, name, amount in made:
        usage = {who: value * 0.5 ** ((at - now) / half_life) for who, value in usage.items()}
        usage[name] += amount
        shares.charge(at, *name, amount)
        now = at
        total = sum(usage.values())
        for who, value in usage.items():
            assert isclose(shares.usage(now, *who), value, rel_tol=1e-9, abs_tol=1)
            if value > 1e-3 * total:
                account = sum(other for (group, _), other in usage.items() if group == who[0])
                accounts = len({group for group, _ in usage if group in shares._root.members})
                assert isclose(shares.level(now, *who)[0], total / accounts / account, rel_tol=1e-6)
