"""Why a job waits is told to its own programs, without the names of other users' jobs."""

import asyncio
from types import SimpleNamespace

from plexrl.pool.api import Api
from plexrl.pool.book import Book
from plexrl.types import Explained, Peer, commands, records

ALICE = Peer(uid=5, user="alice", account="a", job="7.0")


def api(text: str) -> tuple[Api, list[str]]:
    """The API of a pool with two jobs of alice's and one of bob's, whose scheduler says `text`."""
    book, asked = Book(), []
    for job, uid in (("7.0", 5), ("8.0", 5), ("9.1", 6)):
        book.apply(records.JobAttached(now_us=1, job=job, slurm_job=7, uid=uid, user=str(uid), account="a"))

    def explain(name: str) -> str:
        asked.append(name)
        return text

    core = SimpleNamespace(book=book, scheduler=SimpleNamespace(explain=explain))
    return Api(core, None, None, None), asked


def test_other_users_jobs_have_no_names():
    said = "Job 7.0 waits: gang g/0 has its turn for job 9.1 on n:0; behind job 8.0, which is first; job 1234.0."
    answers, asked = api(said)
    told = asyncio.run(answers.answer(ALICE, commands.Explain()))
    assert asked == ["7.0"]
    assert told == Explained(
        job="7.0",
        text="Job 7.0 waits: gang g/0 has its turn for another user's job on n:0; behind job 8.0, which is first; "
        "another user's job.",
    )
