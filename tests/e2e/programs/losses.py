"""Every loss through nothing but the public tinker SDK: on own samples, custom, and with faults. Prints JSON."""

import math

import tinker
import torch
from ending import end
from tinker import types

seen: dict[str, object] = {}
service = tinker.ServiceClient()
trainer = service.create_lora_training_client("tiny", rank=8, seed=3).result()
prompt = trainer.get_tokenizer().encode("2 + 3 =")
sampler = trainer.save_weights_and_get_sampling_client(record_stability_info=True)
params = types.SamplingParams(max_tokens=8, seed=11, stop=[])
drawn = sampler.sample(types.ModelInput.from_ints(prompt), num_samples=4, sampling_params=params).result().sequences
pad = len(prompt) - 1


def datum(sequence: types.SampledSequence, index: int, **more: object) -> types.Datum:
    """One answer, off policy by what is added to its logprobs, with provenance as the cookbook's programs give it."""
    tokens = prompt + sequence.tokens
    shift = [0.4 * (-1) ** (t + index) for t in range(len(sequence.tokens))]
    row = types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": tokens[1:],
            "logprobs": [0.0] * pad + [q + s for q, s in zip(sequence.logprobs, shift, strict=True)],
            "advantages": [0.0] * pad + [1.0 if index % 2 else -0.7] * len(sequence.tokens),
            **more,
        },
    )
    given = {"sequence_id": sequence.sequence_id}
    return row.with_provenance(
        model_input=[
            types.PromptProvenanceSpan(length=len(prompt), **given),
            types.SampledProvenanceSpan(length=len(sequence.tokens) - 1, **given),
        ],
        loss_fn_inputs=[
            types.PromptProvenanceSpan(offset=1, length=pad, **given),
            types.SampledProvenanceSpan(length=len(sequence.tokens), **given),
        ],
    )


def numbers(rows: list[types.Datum]) -> list[dict[str, list]]:
    """What was sent, for the test."""
    return [{name: tensor.tolist() for name, tensor in row.loss_fn_inputs.items()} for row in rows]


# Every loss that takes samples: defaults and a configuration. Nothing is stepped in between.
CASES = [
    ("importance_sampling", None),
    ("ppo", None),
    ("ppo", {"clip_low_threshold": 0.9, "clip_high_threshold": 1.05}),
    ("cispo", None),
    ("cispo", {"clip_low_threshold": 0.9, "clip_high_threshold": 1.05}),
    ("dro", None),
    ("dro", {"beta": 0.5}),
    ("gspo", None),
    ("gspo", {"clip_low_threshold": 0.99, "clip_high_threshold": 1.01}),
    ("stable_reinforce", None),
    ("stable_reinforce", {"kl_coeff": 0.3}),
]
seen["pad"], seen["losses"] = pad, []
for name, config in CASES:
    mask = {"sequence_ratio_mask": [0.0] * pad + [1.0] * 8} if name == "gspo" else {}
    rows = [datum(sequence, index, **mask) for index, sequence in enumerate(drawn)]
    result = trainer.forward_backward(rows, name, config).result()
    logprobs = [output["logprobs"].tolist() for output in result.loss_fn_outputs]
    seen["losses"].append([name, config or {}, numbers(rows), logprobs, result.metrics["loss:sum"]])
seen["grad_norm"] = trainer.optim_step(types.AdamParams(learning_rate=1e-3)).result().metrics["grad_norm"]

# A custom loss equal to cross_entropy leaves the bits that cross_entropy leaves.
tokens = prompt + drawn[0].tokens
weights = [0.0] * pad + [0.5 + 0.1 * t for t in range(8)]
row = types.Datum(
    model_input=types.ModelInput.from_ints(tokens[:-1]),
    loss_fn_inputs={"target_tokens": tokens[1:], "weights": weights},
)


def as_cross_entropy(data, logprobs):
    """The definition of cross_entropy, in the client."""
    parts = [(lp * d.loss_fn_inputs["weights"].to_torch()).sum() for d, lp in zip(data, logprobs, strict=True)]
    return -sum(parts), {"mine": float(sum(parts))}


after = []
for custom in (False, True):
    twin = service.create_lora_training_client("tiny", rank=8, seed=5).result()
    for _ in range(3):
        if custom:
            result = twin.forward_backward_custom([row], as_cross_entropy).result()
        else:
            result = twin.forward_backward([row], "cross_entropy").result()
        twin.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    forward = twin.forward([row], "cross_entropy").result()
    after.append((result.metrics["loss:sum"], forward.loss_fn_outputs[0]["logprobs"].tolist()))
seen["custom_equal"] = after[0][1] == after[1][1]
seen["custom_losses"] = [after[0][0], after[1][0]]
seen["custom_metric"] = result.metrics["mine"]

# Soft targets: K targets per position, a loss over their logprobs that is no weighted sum (here a preference).
soft = types.Datum(
    model_input=types.ModelInput.from_ints(prompt),
    loss_fn_inputs={"target_tokens": torch.tensor([[5, 9]] * len(prompt))},
)


def preference(data, logprobs):
    """The first target of each position before the second."""
    return -torch.nn.functional.logsigmoid(logprobs[0][:, 0] - logprobs[0][:, 1]).sum(), {}


gaps = []
for _ in range(6):
    result = twin.forward_backward_custom([soft], preference).result()
    twin.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    gaps.append(result.metrics["loss:sum"])
seen["preference"] = gaps

# What is wrong is refused by name, and what was done before is kept: the gradient below is that of the good call alone.
good = [datum(sequence, index) for index, sequence in enumerate(drawn)]
alone = service.create_lora_training_client("tiny", rank=8, seed=9).result()
tried = service.create_lora_training_client("tiny", rank=8, seed=9).result()
for client in (alone, tried):
    client.forward_backward(good, "ppo").result()


def wrong(key: str, value: object) -> list[types.Datum]:
    """The good data with one input of the second datum changed or, for None, left out."""
    inputs = {name: tensor for name, tensor in good[1].loss_fn_inputs.items() if name != key}
    if value is not None:
        inputs[key] = value
    return [good[0], types.Datum(model_input=good[1].model_input, loss_fn_inputs=inputs)]


length = len(tokens) - 1
FAULTS = {
    "nan": (wrong("advantages", [math.nan] * length), "ppo", None),
    "short": (wrong("advantages", [1.0] * (length - 2)), "ppo", None),
    "missing": (wrong("logprobs", None), "ppo", None),
    "integers": (wrong("advantages", types.TensorData(data=[1] * length, dtype="int64", shape=[length])), "ppo", None),
    "unused": (wrong("weights", [1.0] * length), "ppo", None),
    "parameter": (good, "ppo", {"clip_epsilon": 0.2}),
    "epsilon": (good, "ppo", {"clip_high_threshold": 0.2}),
    "text": (good, "dro", {"beta": "small"}),
    "none": (good, "importance_sampling", {"beta": 0.1}),
    "bare": (wrong("advantages", [1.0] * length), "stable_reinforce", None),
    "prompt": ([good[0], datum(drawn[1], 1, advantages=[1.0] * length)], "stable_reinforce", None),
    "overflow": (wrong("logprobs", [-1e4] * length)[1:] + good[:1], "importance_sampling", None),
    "server-side": (good, "custom", {"loss_id": "x"}),
}
seen["faults"] = {}
for what, (rows, name, config) in FAULTS.items():
    try:
        tried.forward_backward(rows, name, config).result()
    except (tinker.APIError, tinker.RequestFailedError) as error:
        category = getattr(error, "category", None)
        seen["faults"][what] = [type(error).__name__, str(error), category and str(category)]
norms = [c.optim_step(types.AdamParams(learning_rate=1e-2)).result().metrics["grad_norm"] for c in (alone, tried)]
seen["kept"] = norms[0] == norms[1] > 0
end(seen)
