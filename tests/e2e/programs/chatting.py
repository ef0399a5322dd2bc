"""OpenAI's API through the unmodified SDK, beside the tinker SDK that publishes what is asked. Prints what it saw."""

import json

import openai
import tinker

client = openai.OpenAI()
service = tinker.ServiceClient()
trainer = service.create_lora_training_client("tiny", rank=8).result()
version = trainer.save_weights_for_sampler("graded").result().path
talk = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi!"}]


def streamed(**fields: object) -> tuple[dict[int, str], int, int]:
    """(Text of each choice, chunks, tokens by the usage)."""
    texts: dict[int, str] = {}
    chunks = tokens = 0
    for chunk in client.chat.completions.create(
        **fields, messages=talk, stream=True, stream_options={"include_usage": True}
    ):
        chunks += 1
        tokens = chunk.usage.completion_tokens if chunk.usage else 0
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
    return texts, chunks, tokens


seen: dict[str, object] = {"models": [model.id for model in client.models.list()], "version": version}
for name in ("tiny", version):
    asked = {"model": name, "max_tokens": 80, "seed": 7, "n": 2, "temperature": 0}
    whole = client.chat.completions.create(**asked, messages=talk)
    texts, chunks, tokens = streamed(**asked)
    seen[name] = {
        "same": [choice.message.content for choice in whole.choices] == [texts[0], texts[1]],
        "tokens": (whole.usage.completion_tokens, tokens),
        "chunks": chunks,
        "finish": [choice.finish_reason for choice in whole.choices],
    }

# What is asked of the engine is what transformers would ask: the same prompt, token by token, scores the same.
tokenizer = trainer.get_tokenizer()
text = tokenizer.apply_chat_template(talk, add_generation_prompt=True, tokenize=False)
prompt = tokenizer.encode(text, add_special_tokens=False)
chat = client.chat.completions.create(model=version, messages=talk, max_tokens=4, temperature=0, logprobs=True)
plain = client.completions.create(model=version, prompt=prompt, max_tokens=4, temperature=0, logprobs=1, echo=True)
sampler = service.create_sampling_client(model_path=version)
reference = sampler.compute_logprobs(tinker.ModelInput.from_ints(prompt)).result()
echoed = plain.choices[0].logprobs.token_logprobs
seen["prompt_tokens"] = (chat.usage.prompt_tokens, len(prompt))
seen["drawn_gap"] = max(
    abs(told.logprob - other)
    for told, other in zip(chat.choices[0].logprobs.content, echoed[len(prompt) :], strict=True)
)
seen["prompt_gap"] = max(abs(told - other) for told, other in zip(echoed[1 : len(prompt)], reference[1:], strict=True))
first = chat.choices[0].message.content[:1]
stopped = client.chat.completions.create(model=version, messages=talk, max_tokens=4, temperature=0, stop=[first])
seen["stopped"] = (stopped.choices[0].message.content, stopped.choices[0].finish_reason)
try:
    client.chat.completions.create(model="tiny", messages=talk, max_tokens=1000)
except openai.BadRequestError as error:
    seen["too_long"] = error.code
service.close(status="success").result()
print(json.dumps(seen))
