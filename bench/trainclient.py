"""The program that bench.train attaches to its pool: training through the SDK, step by step beside the plain one.

Work as JSON in argv; progress on stderr, JSON on stdout: seconds of every step on both sides.
"""

import json
import os
import subprocess
import sys
import time

import msgspec
import tinker
from tinker import types

from bench.trainwork import MODEL, Work, sequences


def main() -> None:
    """Both sides in turn, so that each pair of steps meets the same neighbours on the machine."""
    work = msgspec.json.decode(sys.argv[1], type=Work)
    service = tinker.ServiceClient()
    trainer = service.create_lora_training_client(MODEL, rank=work.rank, seed=0, train_unembed=False).result()
    command = [sys.executable, "-m", "bench.trainplain", sys.argv[1]]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as plain:
        steps = []
        for number in range(work.steps + 1):
            data = [
                types.Datum(
                    model_input=types.ModelInput.from_ints(row[:-1]),
                    loss_fn_inputs={"target_tokens": row[1:], "weights": [1.0] * (len(row) - 1)},
                )
                for row in sequences(work, number).tolist()
            ]
            begun = time.perf_counter()
            backward = trainer.forward_backward(data, "cross_entropy")
            update = trainer.optim_step(types.AdamParams(learning_rate=1e-5, eps=1e-8))
            backward.result()
            update.result()
            pool = time.perf_counter() - begun
            plain.stdin.write("step\n")
            plain.stdin.flush()
            line = next((line for line in plain.stdout if line[0].isdigit()), "")
            if not line:
                sys.exit("the plain program ended")
            steps.append((pool, json.loads(line)))
            print(
                f"bench.train: step {number} of {work.steps}: pool {pool:.2f} s, plain {steps[-1][1]:.2f} s",
                file=sys.stderr,
            )
        plain.stdin.close()
    sys.stdout.write(json.dumps(steps[1:]) + "\n")
    sys.stdout.flush()
    # The SDK's own threads do not end; nothing of ours is left to do.
    os._exit(0)


if __name__ == "__main__":
    main()
