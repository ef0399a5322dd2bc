"""The program of bench.turnabout: for each line on stdin a round of training and drawing by turns, then a line out."""

import json
import os
import sys

import tinker
from tinker import types

settings = json.loads(sys.argv[1])
service = tinker.ServiceClient()
trainer = service.create_lora_training_client(settings["base"], rank=8, seed=3, train_unembed=False).result()
sampler = trainer.save_weights_and_get_sampling_client()
tokens = list(range(3, 35))
row = types.Datum(
    model_input=types.ModelInput.from_ints(tokens[:-1]),
    loss_fn_inputs={"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)},
)
for rounds in settings["rounds"]:
    sys.stdin.readline()
    for _ in range(rounds):
        trainer.forward_backward([row], "cross_entropy").result()
        trainer.optim_step(types.AdamParams(learning_rate=1e-4)).result()
        params = types.SamplingParams(max_tokens=4, temperature=1.0, seed=1, stop=[])
        sampler.sample(types.ModelInput.from_ints(tokens), num_samples=2, sampling_params=params).result()
    print("done", flush=True)
sys.stdin.readline()
os._exit(0)  # transport threads of the SDK can abort an interpreter's exit
