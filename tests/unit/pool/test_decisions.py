"""The ring of decisions and its file."""

import json

from plexrl.pool.decisions import KEPT, Decisions
from plexrl.scheduler import Policy, Scheduler, Turn


def test_the_newest_are_kept_and_written_when_there_are_new_ones(tmp_path):
    decisions, scheduler = Decisions(), Scheduler({"n:0": 64}, Policy())
    path = tmp_path / "decisions.jsonl"
    decisions.write(path)
    assert not path.exists()
    for number in range(KEPT + 5):
        ended = bool(number % 2)
        decisions.add(number, Turn(f"g/{number}", ended, "drained" if ended else "switch", 3, 1.5), scheduler)
    decisions.write(path)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["now_us"] for line in lines] == list(range(5, KEPT + 5))
    assert lines[0] == {"now_us": 5, "gang": "g/5", "what": "ended", "reason": "drained"}
    assert lines[1] == {
        "now_us": 6, "gang": "g/6", "what": "began", "reason": "switch", "job": "", "waited_us": 3, "score": 1.5,
    }  # fmt: skip
    path.unlink()
    decisions.write(path)
    assert not path.exists()
