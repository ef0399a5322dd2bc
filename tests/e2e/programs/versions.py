"""Versions of one model through the public SDKs: pinned, counted, too old, brought back. Prints JSON.

With --hit FOLDER: hit.published is written when a second version of full parameters is there and nobody has drawn by
it; it is drawn from when hit.go is there.
"""

import argparse
import os
import time
from pathlib import Path

import httpx
import openai
import tinker
from ending import end
from tinker import types

parser = argparse.ArgumentParser()
parser.add_argument("--hit", type=Path)
args = parser.parse_args()

seen: dict[str, object] = {}
service = tinker.ServiceClient()
trainer = service.create_lora_training_client("tiny", rank=0 if args.hit else 8, seed=3).result()
prompt = trainer.get_tokenizer().encode("2 + 3 =")
pad = len(prompt) - 1
row = prompt + trainer.get_tokenizer().encode(" 5")
sft = types.Datum(
    model_input=types.ModelInput.from_ints(row[:-1]),
    loss_fn_inputs={"target_tokens": row[1:], "weights": [1.0] * (len(row) - 1)},
)


def step() -> None:
    """Other weights."""
    trainer.forward_backward([sft], "cross_entropy").result()
    trainer.optim_step(types.AdamParams(learning_rate=2e-3 if args.hit else 2e-2)).result()


def draw(client: tinker.SamplingClient, count: int = 2, tokens: int = 8) -> list[types.SampledSequence]:
    """The same by the same version."""
    params = types.SamplingParams(max_tokens=tokens, seed=11, stop=[])
    return client.sample(types.ModelInput.from_ints(prompt), count, params).result().sequences


def gap(drawn: list[types.SampledSequence]) -> float:
    """Between the logprobs of the draw and the trainer's, of the weights that it has now."""
    rows = [prompt + s.tokens for s in drawn]
    data = [
        types.Datum(model_input=types.ModelInput.from_ints(r[:-1]), loss_fn_inputs={"target_tokens": r[1:]})
        for r in rows
    ]
    found = [o["logprobs"].tolist() for o in trainer.forward(data, "cross_entropy").result().loss_fn_outputs]
    return max(abs(a - b) for s, f in zip(drawn, found, strict=True) for a, b in zip(s.logprobs, f[pad:], strict=True))


def datum(sequence: types.SampledSequence) -> types.Datum:
    """A sampled answer with provenance."""
    given = {"sequence_id": sequence.sequence_id}
    tokens = prompt + sequence.tokens
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": tokens[1:],
            "logprobs": [0.0] * pad + sequence.logprobs,
            "advantages": [0.0] * pad + [1.0] * len(sequence.tokens),
        },
    ).with_provenance(
        model_input=[
            types.PromptProvenanceSpan(length=len(prompt), **given),
            types.SampledProvenanceSpan(length=len(sequence.tokens) - 1, **given),
        ],
        loss_fn_inputs=[
            types.PromptProvenanceSpan(offset=1, length=pad, **given),
            types.SampledProvenanceSpan(length=len(sequence.tokens), **given),
        ],
    )


if args.hit:
    first = trainer.save_weights_and_get_sampling_client()
    seen["first"] = gap(draw(first))
    step()
    second = trainer.save_weights_and_get_sampling_client()
    (args.hit / "hit.published").touch()
    while not (args.hit / "hit.go").exists():
        time.sleep(0.02)
    seen["second"] = gap(draw(second, 8, 60))
    end(seen)

named = trainer.save_weights_for_sampler("one").result().path
clients, drawn = [], []
for _ in range(3):
    step()
    clients.append(trainer.save_weights_and_get_sampling_client())
    drawn.append(draw(clients[-1]))
again = draw(clients[0])  # two behind: it had left the memory
seen["pinned"] = [(a.tokens, a.logprobs) == (b.tokens, b.logprobs) for a, b in zip(drawn[0], again, strict=True)]
seen["other"] = drawn[0][0].logprobs != drawn[2][0].logprobs

head = httpx.Client(
    base_url=os.environ["TINKER_BASE_URL"], headers={"x-api-key": os.environ["TINKER_API_KEY"]}, timeout=60
)
request = drawn[0][0].sequence_id.rpartition(":")[0]
seen["header"] = head.post("/api/v1/retrieve_future", json={"request_id": request}).headers["x-plexrl-version"]
seen["models"] = head.get("/plexrl/v1/models").json()
seen["jobs"] = head.get("/plexrl/v1/pool").json()["jobs"]

chat = openai.OpenAI(max_retries=0)
try:
    chat.completions.create(model=named, prompt="2 + 3 =", max_tokens=2)
except openai.BadRequestError as error:
    seen["openai"] = [error.code, error.message]
try:
    draw(service.create_sampling_client(model_path=named))
except tinker.BadRequestError as error:
    seen["tinker"] = error.body

step()
trainer.save_weights_for_sampler("newest").result()  # published before the data come: a call is refused as it comes
try:
    trainer.forward_backward([datum(drawn[0][0])], "importance_sampling").result()
except tinker.BadRequestError as error:
    seen["data"] = error.body
seen["fresh"] = len(trainer.forward_backward([datum(drawn[1][0])], "importance_sampling").result().loss_fn_outputs)
end(seen)
