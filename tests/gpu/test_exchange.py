"""Two processes exchange their states on one GPU, bit for bit, as bench.switch_cuda does."""

import json

import pytest

from bench.switch_cuda import exchange, measure, table

pytestmark = pytest.mark.gpu


@pytest.mark.timeout(240)
def test_two_processes_exchange_bit_for_bit():
    """exchange() raises when a byte differs; a gibibyte each, more than one of them never on the GPU."""
    row, once = exchange(lambda line: None, 1 << 30, 300, 2, 0.5)
    assert row["exchange_ratio"] > 0 and row["clean_bytes_out"] == 0 and row["hot_path_allocations"] == 0
    # A context and torch's own kernels, no state: far below the state's size.
    assert 0 < once["residual_bytes_asleep"] < 1 << 30


@pytest.mark.timeout(400)
def test_the_bench_ends_with_a_table():
    figures = measure(lambda line: None)
    assert json.loads(json.dumps(figures)) == figures
    assert figures["gpu"] in table(figures)
