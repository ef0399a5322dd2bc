"""Pools for end-to-end tests."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from .localpool import LocalPool

MIB = 1 << 20
HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """They take seconds; on a machine that is busy with other things they may take minutes."""
    for item in items:
        if item.path.is_relative_to(HERE) and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(400))


@pytest.fixture
def local_pool(tmp_path: Path, tiny_model: Path) -> Iterator[Callable[..., LocalPool]]:
    """Starts private pools of the tiny model; ends them with the test. sections: more of plexrl.yaml."""
    pools: list[LocalPool] = []

    def start(gpus: int = 1, device: int = 64 * MIB, model: dict | None = None, **sections: object) -> LocalPool:
        root = tmp_path / f"pool{len(pools)}"
        root.mkdir()
        tiny = {
            "path": str(tiny_model),
            "max_context": 128,
            "micro_batch_tokens": 256,
            "train": {"gpus": gpus},
            "sample": {"replicas": gpus, "kv_bytes": 2 * MIB, "max_batch": 16},
            "lora": {"max_rank": 8, "slots": 1},
            **(model or {}),
        }
        config = {
            "models": {"tiny": tiny},
            "device": {"kind": "cpu", "bytes": device},
            "host": {"bytes": 256 * MIB},
            **sections,
        }
        pool = LocalPool(root, config, gpus)
        pools.append(pool)
        pool.start()
        return pool

    yield start
    for pool in pools:
        pool.stop()
