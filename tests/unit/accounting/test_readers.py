"""Who sees what: an ordinary user, a coordinator, an operator; and what a refusal says."""

import os
import pwd

import pytest

from plexrl.accounting import acl, readers
from plexrl.accounting.figures import figures
from plexrl.accounting.published import compute, for_reader
from plexrl.accounting.readers import Readers
from plexrl.accounting.store import Store
from plexrl.slurm.adapter import Person
from plexrl.types import BadInput, Unavailable
from tests.unit.accounting.test_store import as_uid, layout, open_folder, publish  # noqa: F401


def test_a_coordinator_sees_the_own_accounts_and_no_other(scene):
    whole = compute(scene.records, scene.intervals(96), scene.us(100), 1000)
    mine = for_reader(whole, 1500, {"bio"})
    assert [job.user for job in mine.jobs] == ["bob"]
    assert figures(mine, account="bio")["jobs"][0]["user"] == "bob"
    for asked in ({"account": "ml"}, {"user": "ada"}):
        with pytest.raises(BadInput, match="your own jobs and those of bio only"):
            figures(mine, **asked)
    with pytest.raises(BadInput, match="your own jobs only"):
        figures(for_reader(whole, 1001), account="bio")
    assert figures(mine)["pool_gpu_seconds"] == figures(whole)["pool_gpu_seconds"]


def test_slurms_people_become_readers():
    me = pwd.getpwuid(os.getuid()).pw_name
    found = readers.readers(
        [
            Person(name=me, admin_level="Operator", coordinates=("bio", "ml")),
            Person(name="nobody-here-has-this-name", admin_level="Administrator", coordinates=("x",)),
        ]
    )
    assert found == Readers(frozenset({os.getuid()}), {os.getuid(): frozenset({"bio", "ml"})})
    plain = Person(name=me, admin_level="None", coordinates=())
    assert readers.readers([plain]) == Readers()


def test_without_slurm_readers_stay_as_they_were(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert readers.asked(None, tmp_path) == Readers()
    (tmp_path / "readers.json").write_text('{"operators":[5],"coordinated":{"7":["bio"]}}')
    assert readers.asked(None, tmp_path) == Readers(frozenset({5}), {7: frozenset({"bio"})})
    (tmp_path / "readers.json").write_text("{")
    assert readers.kept(tmp_path) == Readers()


def test_the_kernel_lets_coordinators_and_operators_in(layout, scene, open_folder):  # noqa: F811
    publisher_of = publish(layout, scene, open_folder)
    assert publisher_of.uid is None
    from plexrl.accounting.store import Publisher

    publisher = Publisher(layout, open_folder, 1000)
    publisher.write(scene.us(100), lambda: Readers(frozenset({1600}), {1500: frozenset({"bio", "gone"})}))
    assert os.getxattr(open_folder / "pool.bin", "system.posix_acl_access") == acl.readable_by(1600)
    if os.geteuid() == 0:  # only root can become somebody else

        def coordinator():
            found = Store(open_folder, 0).read()
            assert found.accounts == ("bio",) and [job.user for job in found.jobs] == ["bob"]

        def operator():
            found = Store(open_folder, 0).read()
            assert found.uid is None and len(found.jobs) == 2

        def stranger():
            with pytest.raises(Unavailable, match="uid 1700"):
                Store(open_folder, 0).read()

        assert [as_uid(uid, act) for uid, act in ((1500, coordinator), (1600, operator), (1700, stranger))] == [0] * 3
    publisher.write(scene.us(100), Readers)  # neither is one any more
    assert not (open_folder / "uid-1500.bin").exists()
    assert "system.posix_acl_access" not in os.listxattr(open_folder / "pool.bin")
