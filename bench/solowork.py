"""What both sides of bench.solo do: the prompts of sbatch_templates/grpo_lora.py, and as much work in every step.

Rewards are left out, because they decide how much there is to learn from: every answer has max_tokens tokens and is
learnt from, one half with advantage 1, the other with -1.
"""

import importlib.util
from pathlib import Path
from types import ModuleType, SimpleNamespace

import msgspec

from plexrl.pool.share import shared

MODEL = "smollm2-135m"


class Work(msgspec.Struct, frozen=True):
    """model: its folder. steps: measured ones; one more comes before them, not counted."""

    model: str
    steps: int
    groups: int
    samples: int
    max_tokens: int
    rank: int
    lr: float
    threads: int


def template() -> ModuleType:
    """sbatch_templates/grpo_lora.py as a module."""
    path = shared("sbatch_templates/grpo_lora.py")
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def prompts(work: Work, tokenizer) -> list[list[list[int]]]:
    """Tokens of every prompt of every step."""
    grpo = template()
    asked = SimpleNamespace(steps=work.steps + 1, groups=work.groups, seed=0)
    made = [grpo.make_prompt(tokenizer, problem) for problem in grpo.draw_problems(asked)]
    return [made[step * work.groups : (step + 1) * work.groups] for step in range(work.steps + 1)]


def advantage(index: int) -> float:
    """Of the answer of that number within its group."""
    return 1.0 if index % 2 else -1.0
