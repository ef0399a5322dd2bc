"""The programs of bench.counterfactual: reinforcement learning with as many tokens in every step, whatever is drawn.

Work as JSON in argv. A synchronous job draws, waits for its tool, learns, publishes, and begins anew. A job with a lag
of one step asks for the next step's answers, from the weights that it has, before it learns from the last ones.
"""

import os
import random
import sys
import time

import msgspec
import tinker
from tinker import types

from bench.solowork import advantage, template

MODEL = "model"


class Work(msgspec.Struct, frozen=True):
    """rank: of the LoRA, 0 for full parameters. Every prompt has prompt_tokens, every answer max_tokens. tool_s: what
    the tool takes in each step."""

    name: str
    lag: bool
    rank: int
    steps: int
    groups: int
    samples: int
    prompt_tokens: int
    max_tokens: int
    tool_s: float
    seed: int = 0


class Job:
    """One job at the pool."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._datum = template().datum
        self._service = tinker.ServiceClient()
        self._trainer = self._service.create_lora_training_client(MODEL, rank=work.rank, seed=work.seed).result()
        self._draw = random.Random(work.seed)

    def run(self) -> None:
        """All steps."""
        asked = self._ask(0) if self._work.lag else None
        for step in range(self._work.steps):
            prompts, futures = asked or self._ask(step)
            groups = [future.result().sequences for future in futures]
            time.sleep(self._work.tool_s)
            if self._work.lag and step + 1 < self._work.steps:
                asked = self._ask(step + 1)
            self._learn(prompts, groups)

    def _ask(self, step: int) -> tuple[list[list[int]], list]:
        """Publish the weights as they are and ask for answers."""
        work = self._work
        sampler = self._trainer.save_weights_and_get_sampling_client().result()
        prompts = [[self._draw.randrange(3, 250) for _ in range(work.prompt_tokens)] for _ in range(work.groups)]
        futures = []
        for index, prompt in enumerate(prompts):
            params = types.SamplingParams(
                max_tokens=work.max_tokens, temperature=1.0, stop=[], seed=step * work.groups + index
            )
            futures.append(sampler.sample(types.ModelInput.from_ints(prompt), work.samples, params))
        return prompts, futures

    def _learn(self, prompts: list[list[int]], groups: list) -> None:
        data = [
            self._datum(prompt, answer, advantage(index))
            for prompt, group in zip(prompts, groups, strict=True)
            for index, answer in enumerate(group)
        ]
        backward = self._trainer.forward_backward(data, "importance_sampling")
        update = self._trainer.optim_step(types.AdamParams(learning_rate=1e-5))
        backward.result()
        update.result()

    def close(self) -> None:
        """Tell the pool that nothing more comes."""
        self._service.close(status="success").result()


def main() -> None:
    """The command."""
    work = msgspec.json.decode(sys.argv[1], type=Work)
    template()  # read before the start
    print("ready", flush=True)
    sys.stdin.readline()
    job = Job(work)
    job.run()
    job.close()
    os._exit(0)  # the SDK's own threads do not end; nothing of ours is left to do


if __name__ == "__main__":
    main()
