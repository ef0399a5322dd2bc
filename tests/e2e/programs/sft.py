"""Training on given data through the public tinker SDK. Prints {"losses", "logprobs", "checkpoint"} as JSON.

With --folder a test sees and steers it: NAME.ready (the model exists), go (waited for before the first step),
NAME.steps (steps done so far).
"""

import argparse
import random
import time
from pathlib import Path

import tinker
from ending import end
from tinker import types

parser = argparse.ArgumentParser()
parser.add_argument("--rank", type=int, default=8)
parser.add_argument("--steps", type=int, default=6)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--loss", default="cross_entropy")
parser.add_argument("--lr", type=float, default=1e-2)
parser.add_argument("--think", type=float, default=0.0)
parser.add_argument("--rows", type=int, default=12)
parser.add_argument("--chunks", type=int, default=2)
parser.add_argument("--folder", type=Path)
parser.add_argument("--name", default="job")
args = parser.parse_args()

draw = random.Random(args.seed)


def datum() -> types.Datum:
    tokens = [draw.randrange(250) for _ in range(draw.randrange(8, 40))]
    inputs, targets = tokens[:-1], tokens[1:]
    if args.loss == "cross_entropy":
        fields = {"weights": [1.0] * len(targets)}
    else:
        # As if these tokens had been drawn once, with these logprobs.
        fields = {
            "logprobs": [draw.uniform(-6.0, -5.0) for _ in targets],
            "advantages": [draw.choice((-1.0, 1.0))] * len(targets),
        }
    return types.Datum(
        model_input=types.ModelInput.from_ints(inputs), loss_fn_inputs={"target_tokens": targets, **fields}
    )


def tell(what: str, text: str = "") -> None:
    if args.folder is not None:
        fresh = args.folder / f"{args.name}.{what}.new"
        fresh.write_text(text)
        fresh.rename(args.folder / f"{args.name}.{what}")


service = tinker.ServiceClient()
trainer = service.create_lora_training_client("tiny", rank=args.rank, seed=1).result()
data = [datum() for _ in range(args.rows)]
tell("ready")
while args.folder is not None and not (args.folder / "go").exists():
    time.sleep(0.01)
losses, last = [], None
for step in range(args.steps):
    # Several forward_backward calls per step: gradients live across calls, and across switches.
    half = -(-len(data) // args.chunks)
    futures = [trainer.forward_backward(data[i : i + half], args.loss) for i in range(0, len(data), half)]
    adam = types.AdamParams(learning_rate=args.lr * (1 - step / (2 * args.steps)), weight_decay=0.01, grad_clip_norm=1)
    stepped = trainer.optim_step(adam)
    results = [future.result() for future in futures]
    stepped.result()
    losses.append([result.metrics["loss:sum"] for result in results])
    last = [output["logprobs"].tolist() for result in results for output in result.loss_fn_outputs]
    tell("steps", str(step + 1))
    time.sleep(args.think)
saved = trainer.save_state("final").result()
end({"losses": losses, "logprobs": last, "checkpoint": saved.path})
