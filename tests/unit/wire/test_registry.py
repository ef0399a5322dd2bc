"""The registry believes root and the pool's accounts only."""

import os

import pytest

from plexrl.types import BadInput, Unavailable
from plexrl.wire.registry import Declared, Live, Registry

UID = os.geteuid()
DECLARED = Declared(name="lab", kind="site", owner_uid=UID, config="/etc/plexrl.yaml", state_dir="/var/lib/plexrl/lab")
LIVE = Live(
    name="lab",
    instance="i1",
    state="ready",
    address="tcp://10.0.0.1:4000",
    server_key="k" * 40,
    nonce="n",
    service_uid=UID,
    slurm_job=12,
    epoch="1-12-0",
)


@pytest.fixture
def registry(tmp_path):
    tmp_path.chmod(0o755)
    registry = Registry(tmp_path, frozenset({UID}))
    registry.declare(DECLARED)
    return registry


def test_what_is_written_is_read(registry, tmp_path):
    assert registry.declared("lab") == DECLARED
    assert registry.live("lab") is None
    registry.publish(LIVE)
    assert registry.live("lab") == LIVE
    assert {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {
        "lab.json": 0o644,
        "lab.live.json": 0o644,
    }
    assert registry.names() == ("lab",)
    registry.withdraw("lab")
    registry.withdraw("lab")
    assert registry.live("lab") is None


def test_a_head_does_not_withdraw_its_successor(registry):
    registry.publish(LIVE)
    registry.withdraw("lab", "i0")
    assert registry.live("lab") == LIVE
    registry.withdraw("lab", "i1")
    assert registry.live("lab") is None


@pytest.mark.parametrize("name", ["", "Lab", "1lab", "la b", "../lab", "l" * 33, "lab\n", "lab.live"])
def test_invalid_names_are_refused_everywhere(registry, name):
    for verb in (registry.declared, registry.live, registry.withdraw):
        with pytest.raises(BadInput, match="no valid pool name"):
            verb(name)


def test_an_undeclared_pool_names_the_declared_ones(registry):
    for verb in (registry.declared, registry.live):
        with pytest.raises(BadInput, match="'other' is not declared .* declared pools: lab"):
            verb("other")


@pytest.mark.parametrize("entry", ["lab.json", "lab.live.json", "."])
@pytest.mark.parametrize("mode", [0o664, 0o646])
def test_what_others_can_write_is_refused(registry, tmp_path, entry, mode):
    registry.publish(LIVE)
    (tmp_path / entry).chmod(mode | (0o111 if entry == "." else 0))
    with pytest.raises(BadInput, match=r"can be written by .* chmod go-w"):
        registry.live("lab")


@pytest.mark.parametrize("entry", ["lab.json", "lab.live.json"])
def test_a_link_is_refused(registry, tmp_path, entry):
    registry.publish(LIVE)
    (tmp_path / entry).rename(tmp_path / "elsewhere")
    (tmp_path / entry).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(BadInput, match="not a link"):
        registry.live("lab")


def test_a_directory_behind_a_link_is_refused(registry, tmp_path):
    link = tmp_path.parent / "link"
    link.symlink_to(tmp_path)
    with pytest.raises(BadInput, match="not a link"):
        Registry(link, frozenset({UID})).declared("lab")


def test_a_fifo_or_folder_in_a_files_place_is_refused_without_waiting(registry, tmp_path):
    os.mkfifo(tmp_path / "lab.live.json")
    with pytest.raises(BadInput, match="no plain file"):
        registry.live("lab")
    (tmp_path / "lab.live.json").unlink()
    (tmp_path / "lab.live.json").mkdir(mode=0o755)
    with pytest.raises(BadInput, match="no plain file"):
        registry.live("lab")


def test_a_file_of_another_account_is_refused(registry, tmp_path):
    """Without root the accounts change places: the files are ours, and we are not among the trusted."""
    if UID == 0:
        registry.publish(LIVE)
        os.chown(tmp_path / "lab.live.json", 12345, -1)
        reader = registry
    else:
        reader = Registry(tmp_path, frozenset({UID + 1}))
    with pytest.raises(BadInput, match="none of the trusted accounts"):
        reader.live("lab")


def test_a_trusted_account_cannot_speak_for_anothers_pool(registry):
    registry.publish(Live(**{**{f: getattr(LIVE, f) for f in LIVE.__struct_fields__}, "service_uid": UID + 1}))
    with pytest.raises(BadInput, match="declared for uid"):
        registry.live("lab")


@pytest.mark.parametrize("content", ["", "{", "[]", '{"name": "lab"}', "\x00" * 70_000])
def test_damaged_files_are_told(registry, tmp_path, content):
    registry.publish(LIVE)
    (tmp_path / "lab.live.json").write_text(content)
    with pytest.raises(BadInput, match=r"lab\.live\.json"):
        registry.live("lab")


def test_a_file_about_another_pool_is_refused(registry, tmp_path):
    (tmp_path / "lab.json").rename(tmp_path / "other.json")
    with pytest.raises(BadInput, match="is about pool 'lab'"):
        registry.declared("other")


def test_a_missing_directory_is_told(tmp_path):
    with pytest.raises(Unavailable, match="does not exist"):
        Registry(tmp_path / "none", frozenset()).names()


def test_readers_see_the_old_or_the_new_file_while_it_is_replaced(registry):
    from threading import Thread

    def publish():
        for number in range(300):
            registry.publish(Live(**{**{f: getattr(LIVE, f) for f in LIVE.__struct_fields__}, "slurm_job": number}))

    registry.publish(LIVE)
    writer = Thread(target=publish)
    writer.start()
    while writer.is_alive():
        assert registry.live("lab") is not None
    writer.join()
