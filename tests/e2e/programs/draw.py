"""Samples from the base model through the public tinker SDK. Prints {"tokens", "logprobs"} as JSON.

With --folder: NAME.ready is written when the sampler has answered once, before the batch is asked for.
"""

import argparse
from pathlib import Path

import tinker
from ending import end
from tinker import types

parser = argparse.ArgumentParser()
parser.add_argument("--calls", type=int, default=8)
parser.add_argument("--samples", type=int, default=2)
parser.add_argument("--tokens", type=int, default=100)
parser.add_argument("--folder", type=Path)
parser.add_argument("--name", default="draw")
args = parser.parse_args()

client = tinker.ServiceClient().create_sampling_client(base_model="tiny")


def sample(seed: int, tokens: int):
    prompt = types.ModelInput.from_ints([seed % 250, 7, 8])
    params = types.SamplingParams(max_tokens=tokens, temperature=1.0, seed=seed, stop=[])
    return client.sample(prompt, num_samples=args.samples, sampling_params=params)


sample(0, 1).result()
if args.folder is not None:
    (args.folder / f"{args.name}.ready").touch()
results = [future.result() for future in [sample(1 + call, args.tokens) for call in range(args.calls)]]
sequences = [sequence for result in results for sequence in result.sequences]
end({"tokens": [s.tokens for s in sequences], "logprobs": [len(s.logprobs) for s in sequences]})
