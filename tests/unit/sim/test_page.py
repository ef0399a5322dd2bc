"""The page stands alone, holds its runs, and lets no name out of its place."""

import json
import re
from html.parser import HTMLParser
from importlib.resources import files

from plexrl.sim.charts import Measure, Series, bars, curves, grid
from plexrl.sim.page import cumulated, document, pictures, queue, section, table
from plexrl.sim.replay import KINDS, duty, replay
from plexrl.sim.result import Bar
from plexrl.sim.table import Column
from tests.unit.sim.made import HOUR, job, result

VOID = {"meta", "input"}
EVIL = "</script><script>alert(1)</script><b>"


class Reader(HTMLParser):
    """Fails on tags that do not match; keeps what stands in the page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict]] = []
        self.data = ""
        self.texts: list[str] = []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-3:]}"
        self.open.pop()

    def handle_data(self, data):
        inside = next((a for t, a in reversed(self.tags) if t == "script"), {})
        if self.open[-1:] == ["script"] and inside.get("type") == "application/json":
            self.data = data
        elif self.open[-1:] != ["script"]:
            self.texts.append(data)


def page(runs) -> Reader:
    return Reader(document("A <run>", "of & with", pictures(runs), runs))


def test_page_is_well_formed_and_needs_nothing_else():
    text = document("A <run>", "words", pictures([result()]), [result()])
    seen = Reader(text)
    assert not re.search(r"https?://|@import|url\(", text)
    assert not [tag for tag, attrs in seen.tags if "src" in attrs or "href" in attrs]
    assert "A <run>" in seen.texts


def test_every_picture_and_control_says_what_it_is():
    for tag, attrs in page([result(), result(policy="isolated")]).tags:
        if tag in ("svg", "canvas"):
            assert attrs["role"] == "img" and attrs["aria-label"]
        if tag == "input":
            assert attrs["aria-label"]


def test_names_cannot_leave_their_place():
    names = ("one", EVIL)
    seen = page([result(names=names, policy=EVIL)])
    assert [tag for tag, _ in seen.tags].count("script") == 2
    (run,) = json.loads(seen.data)["runs"]
    assert run["jobs"] == list(names) and run["name"] == EVIL
    drawn = Reader(section(EVIL, table([Column("k", EVIL, text=True)], [{"k": EVIL}]), EVIL))
    assert {tag for tag, _ in drawn.tags} == {"section", "h2", "p", "div", "table", "thead", "tr", "th", "tbody", "td"}


def test_a_run_without_a_timeline_has_curves_and_no_player():
    seen = page([result(timeline=(), marks=())])
    assert "script" not in [tag for tag, _ in seen.tags]
    assert "Queue" in seen.texts and "Duty cycle over time" not in seen.texts


def test_replay_merges_gpus_that_do_the_same():
    run = replay(result())
    assert run["lanes"] == [["n1:0 .. n1:1", 2], ["n1:2", 1], ["n1:3", 1]]
    assert (run["gpus"], run["left_out"], run["end"]) == (4, 0, 3600.0)
    assert run["bars"][0][:2] == [[0.0, 36.0, KINDS.index("switch"), 0], [36.0, 180.0, KINDS.index("busy"), 0]]
    assert [run["gangs"][run["marks"][0][1]], run["reasons"][run["marks"][0][3]]] == ["one/0", "switch"]


def test_replay_of_a_large_run_stays_small():
    bars = [
        Bar(f"n{gpu}:0", start, start + 900, "busy", "g/0", f"j{start % 7}")
        for gpu in range(80)
        for start in range(gpu, HOUR, HOUR // 1000)
    ]
    run = replay(result(gpus=2048, timeline=tuple(bars), marks=()))
    assert len(run["lanes"]) == 64 and run["left_out"] == 2048 - 64
    assert sum(map(len, run["bars"])) <= 40_000 + 64


def test_duty_is_the_busy_share_of_all_gpus():
    timeline = [Bar("n:0", 0, HOUR, "busy", "g/0", "j"), Bar("n:1", 0, HOUR, "kept", "g/1", "j")]
    assert {round(share, 9) for _, share in duty(timeline, 2, HOUR)} == {0.5}


def test_queue_counts_jobs_between_arrival_and_placement():
    waiting = queue([job("a", 0, HOUR), job("b", HOUR // 2, 2 * HOUR), job("c")])
    assert waiting == [(0.0, 1.0), (0.5, 2.0), (1.0, 1.0), (2.0, 0.0)]


def test_cumulated_ends_at_one():
    assert cumulated([3.0, 1.0]) == [(1.0, 0.5), (3.0, 1.0)]


def test_charts_are_well_formed():
    many = [(x / 10, x % 7) for x in range(5000)]
    drawn = curves([Series("a<b", many, 9), Series("none", [], 1)], "l", "x", "y")
    assert drawn.count(",") < 700
    drawn += bars([Measure("m", -0.2, "w", 1, ((0.3, "bound"),))], "bars")
    drawn += grid(["0.1"], ["0"], [[0.25]], "x", "y")
    assert "25.0 %" in Reader(drawn).texts


def test_the_page_has_every_element_that_the_player_asks_for():
    script = (files("plexrl.sim") / "player.js").read_text(encoding="utf-8")
    asked = set(re.findall(r'\bel\("(\w+)"\)', script)) | set(re.findall(r'getElementById\("(\w+)"\)', script))
    there = {attrs["id"] for _, attrs in page([result(), result()]).tags if "id" in attrs}
    assert asked == there
