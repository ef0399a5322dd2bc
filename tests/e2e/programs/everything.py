"""SFT, then RL, then save, reload and sample, through nothing but the public tinker SDK. Prints what it saw as JSON."""

import argparse

import tinker
from ending import end
from tinker import types

parser = argparse.ArgumentParser()
parser.add_argument("--base", default="tiny")
parser.add_argument("--rank", type=int, default=8)
args = parser.parse_args()

seen: dict[str, object] = {}
service = tinker.ServiceClient()
seen["models"] = [m.model_name for m in service.get_server_capabilities().supported_models]
trainer = service.create_lora_training_client(args.base, rank=args.rank, seed=3).result()
info = trainer.get_info()
seen["is_lora"], seen["lora_rank"] = info.is_lora, info.lora_rank
tokenizer = trainer.get_tokenizer()
prompt = tokenizer.encode("2 + 3 =")
answer = tokenizer.encode(" 5")

# SFT: the answer becomes likely.
row = types.Datum(
    model_input=types.ModelInput.from_ints((prompt + answer)[:-1]),
    loss_fn_inputs={
        "target_tokens": (prompt + answer)[1:],
        "weights": [0.0] * (len(prompt) - 1) + [1.0] * len(answer),
    },
)
losses = []
for _ in range(8):
    result = trainer.forward_backward([row], "cross_entropy").result()
    trainer.optim_step(types.AdamParams(learning_rate=2e-2)).result()
    losses.append(result.metrics["loss:sum"])
seen["losses"] = losses
before = trainer.forward([row], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].tolist()

# RL: samples, importance sampling, one step.
sampler = trainer.save_weights_and_get_sampling_client()
params = types.SamplingParams(max_tokens=6, temperature=1.0, seed=11, stop=[])
drawn = sampler.sample(types.ModelInput.from_ints(prompt), num_samples=4, sampling_params=params).result()
again = sampler.sample(types.ModelInput.from_ints(prompt), num_samples=4, sampling_params=params).result()
seen["same_seed_same_tokens"] = [s.tokens for s in drawn.sequences] == [s.tokens for s in again.sequences]
data, gaps = [], []
for index, sequence in enumerate(drawn.sequences):
    tokens = prompt + sequence.tokens
    pad = len(prompt) - 1
    data.append(
        types.Datum(
            model_input=types.ModelInput.from_ints(tokens[:-1]),
            loss_fn_inputs={
                "target_tokens": tokens[1:],
                "logprobs": [0.0] * pad + sequence.logprobs,
                "advantages": [0.0] * pad + [1.0 if index % 2 else -1.0] * len(sequence.tokens),
            },
        )
    )
forced = trainer.forward(data, "importance_sampling").result()
for sequence, output in zip(drawn.sequences, forced.loss_fn_outputs, strict=True):
    theirs = output["logprobs"].tolist()[len(prompt) - 1 :]
    gaps += [abs(a - b) for a, b in zip(sequence.logprobs, theirs, strict=True)]
seen["worst_logprob_gap"] = max(gaps)
trainer.forward_backward(data, "importance_sampling").result()
trainer.optim_step(types.AdamParams(learning_rate=1e-4)).result()

# Save, reload with and without the optimizer, sample by name.
path = trainer.save_state("kept").result().path
after = trainer.forward([row], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].tolist()
seen["rl_changed_weights"] = before != after
copy = service.create_training_client_from_state_with_optimizer(path)
seen["reloaded_equal"] = copy.forward([row], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].tolist() == after
for client in (trainer, copy):
    client.forward_backward([row], "cross_entropy").result()
    client.optim_step(types.AdamParams(learning_rate=1e-3)).result()
twins = [c.forward([row], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].tolist() for c in (trainer, copy)]
seen["reloaded_trains_equal"] = twins[0] == twins[1]
trainer.load_state(path).result()
seen["load_state_equal"] = (
    trainer.forward([row], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].tolist() == after
)
named = trainer.save_weights_for_sampler("published").result().path
client = service.create_sampling_client(model_path=named)
greedy = types.SamplingParams(max_tokens=4, temperature=0.0, stop=[])
one = client.sample(types.ModelInput.from_ints(prompt), num_samples=1, sampling_params=greedy).result()
seen["published"], seen["greedy"] = named, one.sequences[0].tokens
scores = client.compute_logprobs(types.ModelInput.from_ints(prompt + answer)).result()
seen["prompt_logprobs"] = [x if x is None else round(x, 4) for x in scores]
base = service.create_sampling_client(base_model=args.base)
seen["base"] = len(
    base.sample(types.ModelInput.from_ints(prompt), num_samples=2, sampling_params=params).result().sequences
)
end(seen)
