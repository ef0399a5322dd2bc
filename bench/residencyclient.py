"""The program that bench.residency attaches to its pool: LoRA deployments of one base, as many as it is told.

Settings as JSON in argv. A number on stdin: have so many deployments, each after a training step (and with `sample`,
a published version that was drawn from); the number on stdout when that is so.
"""

import json
import os
import sys

import tinker
from tinker import types

MODEL = "base"


def main() -> None:
    """Until stdin ends."""
    settings = json.loads(sys.argv[1])
    service = tinker.ServiceClient()
    tokens = list(range(10, 34))
    datum = types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)},
    )
    trainers = []
    samplers = []
    for line in sys.stdin:
        while len(trainers) < int(line):
            trainer = service.create_lora_training_client(MODEL, rank=settings["rank"], seed=len(trainers)).result()
            trainers.append(trainer)
            backward = trainer.forward_backward([datum], "cross_entropy")
            step = trainer.optim_step(types.AdamParams(learning_rate=1e-4))
            backward.result()
            step.result()
            if settings["sample"]:
                sampler = trainer.save_weights_and_get_sampling_client().result()
                params = types.SamplingParams(max_tokens=4, stop=[], seed=1)
                sampler.sample(types.ModelInput.from_ints(tokens), 1, params).result()
                samplers.append(sampler)
            print(f"bench.residency: {len(trainers)} deployments", file=sys.stderr, flush=True)
        print(len(trainers), flush=True)
    # The SDK's own threads do not end; nothing of ours is left to do.
    os._exit(0)


if __name__ == "__main__":
    main()
