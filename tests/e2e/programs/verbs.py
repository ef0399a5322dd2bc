"""Saves two states, asks plexrl's verbs from within the job, and waits to be ended. argv: folder for what it saw."""

import json
import subprocess
import sys
import time
from pathlib import Path

import tinker

folder = Path(sys.argv[1])
service = tinker.ServiceClient()
trainer = service.create_lora_training_client("tiny", rank=8).result()
paths = [trainer.save_state(name).result().path for name in ("first", "second")]


def plexrl(*arguments: str) -> dict:
    done = subprocess.run(
        [sys.executable, "-m", "plexrl.cli.main", *arguments], capture_output=True, text=True, timeout=120
    )
    out = json.loads(done.stdout) if done.returncode == 0 else done.stdout
    return {"code": done.returncode, "out": out, "err": done.stderr}


seen = {
    "paths": paths,
    "queue": plexrl("queue", "--json"),
    "jobs": plexrl("jobs", "--json"),
    "list": plexrl("checkpoint", "list", "--json"),
    "delete": plexrl("checkpoint", "delete", "--json", paths[0]),
    "again": plexrl("checkpoint", "delete", paths[0]),
    "escape": plexrl("checkpoint", "delete", "tinker://../weights/second"),
    "left": plexrl("checkpoint", "list", "--json"),
    "loads": service.create_training_client_from_state(paths[1]).result().get_info().model_id,
}
(folder / "seen.new").write_text(json.dumps(seen))
(folder / "seen.new").rename(folder / "seen.json")
time.sleep(600)
