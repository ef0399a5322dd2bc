"""The report as people see it: overlap figures, terminal, page, command."""

import json
import re
from html.parser import HTMLParser

import msgspec
import pytest
from rich.console import Console
from typer.testing import CliRunner

from plexrl.accounting.figures import figures
from plexrl.accounting.overlap import stall_overlap, switch_totals
from plexrl.accounting.page import page
from plexrl.accounting.published import Bar, compute, for_reader
from plexrl.accounting.table import render
from plexrl.accounting.timeline import coarse, liveliest
from plexrl.accounting.words import Unit, minus, percent
from plexrl.cli.main import app
from plexrl.types import SpanClass
from plexrl.types import records as r
from tests.unit.accounting.scene import T0, S


def seconds(*pairs):
    return [(T0 / S + start, T0 / S + end) for start, end in pairs]


def test_stalls_that_another_job_filled(scene):
    # job 11.0 is busy 11 to 19, 31 to 39, ... on both GPUs
    assert stall_overlap(scene.records, seconds((21, 41)), "12.0", "11.0") == pytest.approx(8 / 20)
    assert stall_overlap(scene.records, seconds((21, 31), (25, 41)), "12.0", "11.0") == pytest.approx(8 / 20)
    assert stall_overlap(scene.records, [], "12.0", "11.0") == 0.0


def test_a_stall_is_not_filled_on_gpus_that_the_stalled_job_never_used(scene):
    def moved(x):
        foreign = isinstance(x, r.SpanClosed) and ("11.0", 10) in x.span.shares
        return msgspec.structs.replace(x, span=msgspec.structs.replace(x.span, gpu="n9:0")) if foreign else x

    assert stall_overlap([moved(x) for x in scene.records], seconds((21, 41)), "12.0", "11.0") == 0.0


def test_a_gang_of_two_switches_once(scene):
    assert switch_totals(scene.records) == (6, 6 * 2 * 50)
    scene.switched(90, "a/0", "n1:0", incoming=False, bytes_out=7)
    assert switch_totals(scene.records) == (6, 6 * 2 * 50 + 7)
    scene.add(r.CallEnded, 91, id="x", ok=True, gang="a/0", moved_bytes=20, moved_us=1)
    assert switch_totals(scene.records) == (6, 6 * 2 * 50 + 27)


def whole(scene):
    return compute(scene.records, scene.intervals(96), scene.us(100), 1000)


def test_the_terminal_says_what_matters(scene):
    console = Console(width=80, record=True, file=open("/dev/null", "w"))
    console.print(render(figures(whole(scene)), "Your own jobs"))
    text = console.export_text()
    for word in ("Pool lab", "(replayed)", "charged to jobs", "saved: colocated - pool", "ada", "bob", "stretch"):
        assert word in text
    assert "Slurm's own accounting was not there" in re.sub(r"\s+", " ", text)
    assert "\u2026" not in text  # nothing is cut off at 80 columns


class Tags(HTMLParser):
    """Collects what could reach outside, and checks that tags close."""

    void = {"meta", "rect", "line", "circle", "br"}

    def __init__(self):
        super().__init__()
        self.open, self.seen, self.links = [], [], []

    def handle_starttag(self, tag, attrs):
        self.seen.append(tag)
        self.links += [value for name, value in attrs if name in ("src", "href", "xlink:href")]
        if tag not in self.void:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.seen.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_needs_nothing_else(scene):
    scene.attach(10.5, "13.0", 1003, "<b>eve</b>", "a&b")
    scene.records.sort(key=lambda x: x.now_us)
    published = whole(scene)
    html = page(figures(published), published)
    tags = Tags()
    tags.feed(html)
    assert tags.open == []
    assert not tags.links and "script" not in tags.seen and "link" not in tags.seen
    assert "url(http" not in html and "@import" not in html
    assert "<b>eve" not in html and "&lt;b&gt;eve" in html
    assert tags.seen.count("svg") >= 4
    for css in ('class="c0 full"', 'class="c1 full"', 'class="c0 kept"', 'class="hatch"', 'class="idle"'):
        assert css in html
    assert "replayed" in html


def test_a_users_page_names_nobody_else(scene):
    mine = for_reader(whole(scene), 1001)
    html = page(figures(mine), mine)
    assert "ada" in html and "bob" not in html and "other jobs" in html


def test_a_page_of_many_jobs_draws_the_largest_and_lists_all(scene):
    for number in range(40):
        scene.attach(10.5, f"{100 + number}.0", 1003, "cem", "bio")
    scene.records.sort(key=lambda x: x.now_us)
    published = whole(scene)
    html = page(figures(published), published)
    assert html.count("<tr><td><i") == 42
    drawn = html[: html.index("<h2>Jobs</h2>")]
    assert "job 11, ada" in drawn and "job 139, cem" not in drawn
    assert html.count('text-anchor="end">job ') <= 16


def test_a_page_of_an_empty_pool(scene):
    empty = compute([], [], 0)
    assert "No job has called the pool yet" in page(figures(empty), empty)


def test_many_bars_become_columns_that_cover_the_same_time():
    bars = [
        Bar("g", i * 10, i * 10 + 10, SpanClass.BUSY if i % 2 else SpanClass.IDLE, (("1.0", 1),) if i % 2 else ())
        for i in range(50_000)
    ]
    few = coarse(bars, 0, 500_000)
    assert len(few) <= 2100
    assert few[0].start_us == 0 and few[-1].end_us == 500_000
    assert all(a.end_us == b.start_us for a, b in zip(few, few[1:], strict=False))


def test_the_liveliest_minute_is_where_gpus_change_hands():
    minute = 60 * S
    calm = [Bar("g", i * S, (i + 1) * S, SpanClass.BUSY, (("1.0", 1),)) for i in range(300)]
    busy = [Bar("g", (300 + i) * S, (301 + i) * S, SpanClass.BUSY, ((f"{i % 2}.0", 1),)) for i in range(60)]
    begin, end = liveliest(calm + busy, 0, 6 * minute)
    assert (begin, end) == (5 * minute, 6 * minute)
    assert liveliest(calm, 0, 2 * minute) is None
    assert liveliest(calm, 0, 5 * minute) is None


def test_numbers_are_written_for_people():
    assert [Unit(100.0)(-3.04), Unit(7200.0)(3600.0)] == ["\u22123.0", "1.00"]
    assert [Unit(100.0).name, Unit(7200.0).name] == ["GPU-s", "GPU-h"]
    assert minus("-0.0") == "0.0"
    assert [percent(0.001), percent(0.5), percent(0.0)] == ["<1 %", "50 %", "0 %"]


def run(*arguments):
    return CliRunner().invoke(app, ["report", *arguments])


def test_the_command(registry, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))  # no sacct
    monkeypatch.delenv("SLURM_PLEXRL_POOL", raising=False)
    done = run("--registry", str(registry), "--json", "--html", str(tmp_path / "out.html"))
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["pool_gpu_seconds"] == 192  # the agents' last seconds are in
    assert found["sacct_gpu_seconds"] is None
    assert "Pool lab" in (tmp_path / "out.html").read_text()
    table = run("--registry", str(registry), "--pool", "lab", "--user", "ada")
    assert table.exit_code == 0 and "ada" in table.stdout and "bob" not in table.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--pool", "other"), "not declared"),
        (("--pool", "No!"), "no valid pool name"),
        (("--since", "yesterday"), "is no time"),
        (("--since", "2999-01-01"), "later"),
        (("--user", "nobody"), "nothing to report about user nobody"),
        (("--html", "/no/such/folder/x.html"), "cannot be written"),
        (("--pool-uids", "x"), "no list of uids"),
    ],
)
def test_bad_input_names_the_mend(registry, monkeypatch, arguments, words):
    monkeypatch.delenv("SLURM_PLEXRL_POOL", raising=False)
    done = run("--registry", str(registry), *arguments)
    assert done.exit_code != 0
    assert words in str(done.exception)
