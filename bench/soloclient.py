"""The program that bench.solo attaches to its pool: GRPO through the SDK, step by step beside the plain one.

Work as JSON in argv; progress on stderr, JSON on stdout: seconds of every step's parts, on both sides.
"""

import json
import os
import subprocess
import sys
import time

import msgspec
import tinker
from tinker import types

from bench.solowork import MODEL, Work, advantage, prompts, template


class Job:
    """The job on the pool."""

    def __init__(self, work: Work):
        self._work = work
        self._datum = template().datum
        self._trainer = tinker.ServiceClient().create_lora_training_client(MODEL, rank=work.rank, seed=0).result()
        self.batches = prompts(work, self._trainer.get_tokenizer())

    def step(self, number: int) -> dict[str, float]:
        """Publish, sample, learn."""
        work, begun = self._work, time.perf_counter()
        sampler = self._trainer.save_weights_and_get_sampling_client().result()
        published = time.perf_counter()
        futures = []
        for index, prompt in enumerate(self.batches[number]):
            params = types.SamplingParams(
                max_tokens=work.max_tokens, temperature=1.0, stop=[], seed=number * work.groups + index
            )
            futures.append(sampler.sample(types.ModelInput.from_ints(prompt), work.samples, params))
        groups = [future.result().sequences for future in futures]
        sampled = time.perf_counter()
        data = [
            self._datum(prompt, answer, advantage(index))
            for prompt, group in zip(self.batches[number], groups, strict=True)
            for index, answer in enumerate(group)
        ]
        backward = self._trainer.forward_backward(data, "importance_sampling")
        update = self._trainer.optim_step(types.AdamParams(learning_rate=work.lr))
        backward.result()
        stepped = time.perf_counter()
        update.result()
        ended = time.perf_counter()
        return {
            "sampling": sampled - begun,
            "training": ended - sampled,
            "publish": published - begun,
            "optim_step": ended - stepped,
        }


def main() -> None:
    """Both sides in turn, so that each pair of steps meets the same neighbours on the machine."""
    work = msgspec.json.decode(sys.argv[1], type=Work)
    command = [sys.executable, "-m", "bench.soloplain", sys.argv[1]]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as plain:
        job = Job(work)
        steps = []
        for number in range(work.steps + 1):
            pool = job.step(number)
            plain.stdin.write("step\n")
            plain.stdin.flush()
            steps.append((pool, json.loads(plain.stdout.readline())))
            told = ["  ".join(f"{name} {seconds:.2f}" for name, seconds in side.items()) for side in steps[-1]]
            print(f"bench.solo: step {number} of {work.steps}: pool {told[0]}; plain {told[1]}", file=sys.stderr)
        plain.stdin.close()
    sys.stdout.write(json.dumps(steps[1:]) + "\n")
    sys.stdout.flush()
    # The SDK's own threads do not end; nothing of ours is left to do.
    os._exit(0)


if __name__ == "__main__":
    main()
