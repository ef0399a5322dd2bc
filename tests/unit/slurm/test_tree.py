"""Slurm's associations as shares of a pool, and where a job's script writes."""

from pathlib import Path

import pytest

from plexrl.slurm.adapter import Association
from plexrl.slurm.output import OUTPUT_FIELDS, expanded, job_output
from plexrl.slurm.tree import line_of, shares_of


def entry(account: str, user: str = "", parent: str = "root", shares: int | None = 1) -> Association:
    return Association(account=account, user=user, parent="" if user else parent, shares=shares, grp_tres_mins={})


def test_an_account_has_its_part_of_all_parts_above_it():
    """Science has 3 of 4, of which physics has half and its own director a quarter; shares are in average accounts."""
    tree = [
        entry("root", parent=""),
        entry("science", shares=3),
        entry("arts", shares=1),
        entry("physics", parent="science", shares=2),
        entry("maths", parent="science", shares=1),
        entry("science", "dora", shares=1),
        entry("physics", "ann", shares=3),
        entry("physics", "bob", shares=None),
        entry("maths", "carl"),
        entry("arts", "eve", shares=0),
    ]
    found = shares_of(tree)
    parts = {account: shares / 4 for account, (shares, _) in found.items()}  # four accounts have users
    # Nobody in arts may have anything: its part is nobody's, as in Slurm.
    assert parts == pytest.approx({"physics": 3 / 8, "maths": 3 / 16, "science": 3 / 16, "arts": 0})
    assert found["physics"][1] == {"ann": 3, "bob": 1} and found["arts"][1] == {"eve": 0}


def test_an_account_that_is_its_parents_stands_for_its_children():
    tree = [
        entry("root", parent=""),
        entry("group", shares=None),
        entry("a", parent="group", shares=1),
        entry("b", shares=1),
        *(entry(account, "u") for account in "ab"),
    ]
    assert {account: shares for account, (shares, _) in shares_of(tree).items()} == {"a": 1, "b": 1}


def test_who_is_above_whom():
    tree = [entry("root", parent=""), entry("a"), entry("b", parent="a"), entry("b", "u"), entry("c", parent="gone")]
    assert line_of(tree) == {"root": ("root",), "a": ("a", "root"), "b": ("b", "a", "root"), "c": ("c", "gone")}


FIELDS = dict(
    zip(OUTPUT_FIELDS, "71 70_3 70 3 my%jjob ann 501 n1 /home/ann (null) (null)".split(), strict=True)
)  # fmt: skip


@pytest.mark.parametrize(
    ("stdout", "path"),
    [
        ("(null)", "/home/ann/slurm-70_3.out"),
        ("out/%x-%j.%u.%N.log", "/home/ann/out/my%jjob-71.ann.n1.log"),
        ("/logs/%5A/%3a-100%%", "/logs/00070/003-100%"),
        ("\\%j", "/home/ann/%j"),
        ("%x%z", "/home/ann/my%jjob%z"),
    ],
)
def test_the_path_of_an_array_elements_output(stdout, path):
    found = job_output(FIELDS | {"STDOUT": stdout})
    assert (found.stdout, found.stderr, found.uid) == (Path(path), Path(path), 501)


def test_another_job_and_its_own_stderr():
    alone = FIELDS | {"ArrayTaskID": "N/A", "ArrayJobID": "71", "STDERR": "%j.err"}
    assert job_output(alone).stdout == Path("/home/ann/slurm-71.out")
    assert job_output(alone).stderr == Path("/home/ann/71.err")
    assert expanded("/x/%j", {"j": "5"}, "/home") == Path("/x/5")
