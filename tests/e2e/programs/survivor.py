"""Trains, saves, is hit in the middle of a call, and goes on from its checkpoint. Prints what it saw as JSON.

Without --hit it trains on without a call to be hit in: what the other should come to.
"""

import argparse
import random
import time
from pathlib import Path

import tinker
from ending import end
from tinker import types

parser = argparse.ArgumentParser()
parser.add_argument("--rank", type=int, default=0)
parser.add_argument("--hit", type=Path, help="folder in which hit.calling is written when the call is on its way")
parser.add_argument(
    "--wait", action="store_true", help="write hit.saved, wait for hit.go before that call and for hit.on after"
)
parser.add_argument("--beyond", action="store_true", help="take a step after the save: the checkpoint is not all then")
args = parser.parse_args()
draw = random.Random(5)


def data(rows: int) -> list[types.Datum]:
    rows = [[draw.randrange(250) for _ in range(60)] for _ in range(rows)]
    return [
        types.Datum(
            model_input=types.ModelInput.from_ints(row[:-1]),
            loss_fn_inputs={"target_tokens": row[1:], "weights": [1.0] * (len(row) - 1)},
        )
        for row in rows
    ]


def train(client: tinker.TrainingClient, batch: list[types.Datum], steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        result = client.forward_backward(batch, "cross_entropy")
        client.optim_step(types.AdamParams(learning_rate=1e-3)).result()
        losses.append(result.result().metrics["loss:sum"])
    return losses


def wait(name: str) -> None:
    while not (args.hit / name).exists():
        time.sleep(0.01)


seen: dict[str, object] = {}
service = tinker.ServiceClient()
trainer = service.create_lora_training_client("tiny", rank=args.rank, seed=1).result()
batch, long = data(8), data(400)
seen["before"] = train(trainer, batch, 2)
seen["kept"] = trainer.save_state("kept").result().path
if args.beyond:
    train(trainer, batch, 1)
if args.wait:
    (args.hit / "hit.saved").touch()
    wait("hit.go")
if args.hit is not None:
    doomed = trainer.forward_backward(long, "cross_entropy")
    time.sleep(0.3)
    (args.hit / "hit.calling").touch()
    errors = []
    for attempt in (lambda: doomed.result(), lambda: trainer.optim_step(types.AdamParams(learning_rate=1)).result()):
        try:
            attempt()
        except tinker.TinkerError as error:
            errors.append(str(error))
    seen["errors"] = errors
    if args.wait:
        wait("hit.on")
    trainer = service.create_training_client_from_state_with_optimizer(seen["kept"])
seen["after"] = train(trainer, batch, 2)
seen["checkpoint"] = trainer.save_state("final").result().path
end(seen)
