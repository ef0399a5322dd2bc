"""What bench.sample's processes share: the work of a row, as JSON in argv or on a line."""

import random

import msgspec

MODEL = "smollm2"
VOCABULARY = 49_152


class Work(msgspec.Struct, frozen=True):
    """model: folder. concurrency: requests at once, one row each. tenants: adapters that share a batch in the last row.

    prompt, new: tokens of each request. rounds: figures are medians over them, both sides in turn. core: of the GPU.
    """

    model: str
    concurrency: tuple[int, ...]
    tenants: int
    tenant_requests: int
    prompt: int
    new: int
    rounds: int
    rank: int
    core: int
    context: int
    kv_bytes: int
    max_batch: int


def prompts(work: Work, count: int, seed: int) -> list[list[int]]:
    """Random tokens: no two requests share a prefix."""
    draw = random.Random(seed)
    return [[draw.randrange(100, VOCABULARY) for _ in range(work.prompt)] for _ in range(count)]
