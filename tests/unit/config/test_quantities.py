"""Sizes and durations."""

import pytest

from plexrl.config import parse_duration, parse_size


@pytest.mark.parametrize(
    ("text", "size"), [("128MiB", 2**27), ("3 GiB", 3 * 2**30), ("1.5GB", 1_500_000_000), (4096, 4096), ("77", 77)]
)
def test_size(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("bad", ["3G", "GiB", "-1MiB", 0, -5, True, None, 1.5, [], "1e9"])
def test_bad_size(bad):
    with pytest.raises(ValueError):
        parse_size(bad)


@pytest.mark.parametrize(
    ("text", "microseconds"),
    [("50ms", 50_000), ("20s", 20_000_000), ("5m", 300_000_000), (0.5, 500_000), ("0", 0), ("7d", 604_800_000_000)],
)
def test_duration(text, microseconds):
    assert parse_duration(text) == microseconds


@pytest.mark.parametrize("bad", ["fast", "1w", -1, True, None, float("nan"), float("inf")])
def test_bad_duration(bad):
    with pytest.raises(ValueError):
        parse_duration(bad)
