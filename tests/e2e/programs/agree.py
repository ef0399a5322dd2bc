"""Trainers, samplers and a frozen reference on the same tokens, through nothing but the public tinker SDK."""

import argparse

import tinker
import torch
from ending import end
from tinker import types

parser = argparse.ArgumentParser()
parser.add_argument("--base", default="tiny")
args = parser.parse_args()

service = tinker.ServiceClient()
seen: dict[str, object] = {}
reference = service.create_sampling_client(base_model=args.base)
params = types.SamplingParams(max_tokens=8, seed=11, stop=[])


def given(tokens: list[int]) -> types.ModelInput:
    """Tokens as a model input."""
    return types.ModelInput.from_ints(tokens)


def forced(client: tinker.TrainingClient, rows: list[list[int]]) -> list[list[float]]:
    """The trainer's logprobs of rows[1:]; without weights cross_entropy counts every position."""
    data = [types.Datum(model_input=given(row[:-1]), loss_fn_inputs={"target_tokens": row[1:]}) for row in rows]
    return [o["logprobs"].tolist() for o in client.forward(data, "cross_entropy").result().loss_fn_outputs]


def worst(one: list[float], other: list[float]) -> float:
    """The largest difference."""
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


# After training, the sampler of what was published against the trainer: drawn tokens, and a prompt's.
KINDS = {"lora": (8, True), "lora-without-head": (8, False), "full": (0, True)}
seen["gaps"], seen["moved"], seen["frozen_gap"] = {}, {}, {}
for name, (rank, unembed) in KINDS.items():
    trainer = service.create_lora_training_client(args.base, rank=rank, seed=3, train_unembed=unembed).result()
    prompt = trainer.get_tokenizer().encode("2 + 3 =")
    row = prompt + trainer.get_tokenizer().encode(" 5")
    fresh = forced(trainer, [row])[0]
    frozen = reference.compute_logprobs(given(row)).result()
    seen["frozen_gap"][name] = worst(fresh, frozen[1:])
    sft = types.Datum(model_input=given(row[:-1]), loss_fn_inputs={"target_tokens": row[1:]})
    for _ in range(4):
        trainer.forward_backward([sft], "cross_entropy").result()
        trainer.optim_step(types.AdamParams(learning_rate=2e-2 if rank else 2e-3)).result()
    sampler = trainer.save_weights_and_get_sampling_client()
    drawn = sampler.sample(given(prompt), num_samples=4, sampling_params=params).result().sequences
    again = forced(trainer, [prompt + s.tokens for s in drawn])
    scored = sampler.compute_logprobs(given(row)).result()
    gaps = [worst(s.logprobs, f[len(prompt) - 1 :]) for s, f in zip(drawn, again, strict=True)]
    gaps.append(worst(scored[1:], forced(trainer, [row])[0]))
    seen["gaps"][name] = max(gaps)
    seen["moved"][name] = worst(scored[1:], fresh)

# KL in the advantages, as the cookbook's incorporate_kl_penalty does it: tokens that the reference finds unlikely lose.
# Loading the state without its optimizer clears the momentum of the steps before.
trainer.load_state(trainer.save_state("trained").result().path).result()
sampler = trainer.save_weights_and_get_sampling_client()
answer = sampler.sample(given(prompt), num_samples=16, sampling_params=params).result()
rows = [prompt + s.tokens for s in answer.sequences]
pad = len(prompt) - 1
futures = [reference.compute_logprobs(given(row)) for row in rows]
ratios = [
    torch.tensor(s.logprobs) - torch.tensor(future.result()[pad + 1 :])
    for s, future in zip(answer.sequences, futures, strict=True)
]
mean = torch.cat(ratios).mean()
penalties = [mean - ratio for ratio in ratios]
data = [
    types.Datum(
        model_input=given(row[:-1]),
        loss_fn_inputs={
            "target_tokens": row[1:],
            "logprobs": [0.0] * pad + s.logprobs,
            "advantages": [0.0] * pad + penalty.tolist(),
        },
    )
    for row, s, penalty in zip(rows, answer.sequences, penalties, strict=True)
]


def pulled() -> float:
    """Sum of log p weighted by the penalties: it rises as the policy goes towards the reference."""
    found = forced(trainer, rows)
    return sum(float((p * torch.tensor(f[pad:])).sum()) for p, f in zip(penalties, found, strict=True))


before = pulled()
trainer.forward_backward(data, "importance_sampling").result()
trainer.optim_step(types.AdamParams(learning_rate=1e-4)).result()
seen["penalty"] = [float(mean), before, pulled()]

# KL to a frozen reference as a custom loss over fixed tokens: half the squared log-ratio.
base = [reference.compute_logprobs(given(row)).result()[1:] for row in rows]
data = [
    types.Datum(
        model_input=given(row[:-1]),
        loss_fn_inputs={
            "target_tokens": row[1:],
            "reference": types.TensorData(data=lp, dtype="float32", shape=[len(lp)]),
        },
    )
    for row, lp in zip(rows, base, strict=True)
]


def to_reference(data, logprobs):
    """k2 of J. Schulman, "Approximating KL Divergence"."""
    pairs = zip(data, logprobs, strict=True)
    return sum(0.5 * (lp - d.loss_fn_inputs["reference"].to_torch()).square().sum() for d, lp in pairs), {}


seen["custom_kl"] = []
for _ in range(6):
    result = trainer.forward_backward_custom(data, to_reference).result()
    trainer.optim_step(types.AdamParams(learning_rate=1e-3)).result()
    seen["custom_kl"].append(result.metrics["loss:sum"])
end(seen)
