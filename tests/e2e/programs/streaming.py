"""One long stream. argv: file to make when the first text has come; file to wait for after having left the stream then.

Prints how the stream ended.
"""

import json
import sys
import time
from pathlib import Path

import openai

begun, *wait_for = (Path(name) for name in sys.argv[1:])
text, finish = "", None
stream = openai.OpenAI().completions.create(model="tiny", prompt="x", max_tokens=700, stream=True, temperature=0)
for chunk in stream:
    text += chunk.choices[0].text
    finish = chunk.choices[0].finish_reason
    begun.touch()
    if wait_for:
        stream.close()
        while not wait_for[0].exists():
            time.sleep(0.05)
        break
print(json.dumps({"finish": finish, "characters": len(text)}))
