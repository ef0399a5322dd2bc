"""Layout, intervals, fault points."""

import os
import subprocess
import sys

import pytest

from plexrl.pool.intervals import IntervalLog, read_intervals
from plexrl.pool.layout import Layout, meta_of
from plexrl.types import BadInput


@pytest.mark.parametrize("name", ["..", "../x", "a/b", ".hidden", "", "x" * 129, "a b", "-dash", "a\0b", "ä"])
def test_checkpoint_names_that_could_escape_are_refused(tmp_path, name):
    with pytest.raises(BadInput, match="is not allowed"):
        Layout(tmp_path).checkpoint(7, "s:train:0", "weights", name)


def test_checkpoints_lie_under_their_owner(tmp_path):
    layout = Layout(tmp_path)
    folder = layout.checkpoint(7, "s:train:0/../../x", "weights", "final")
    assert folder.parent.parent.parent == layout.checkpoints / "7"
    assert ".." not in folder.relative_to(layout.checkpoints).parts
    assert meta_of(folder).parent == folder.parent


def test_a_folder_that_others_can_read_is_refused(tmp_path):
    layout = Layout(tmp_path / "state")
    layout.make()
    assert layout.run.stat().st_mode & 0o777 == 0o700
    os.chmod(layout.root, 0o750)
    with pytest.raises(BadInput, match="mode 750"):
        layout.make()


def test_run_is_empty_after_an_orderly_end(tmp_path):
    layout = Layout(tmp_path / "state")
    layout.make()
    (layout.run / ".status.77").touch()
    layout.control.touch()
    layout.sweep()
    assert list(layout.run.iterdir()) == [layout.control]
    (layout.run / "faults").mkdir()
    (layout.run / "faults" / "applied-optim_step").touch()
    layout.clear()
    assert list(layout.run.iterdir()) == []


def test_the_last_interval_of_a_gpu_wins_and_a_cut_line_is_not_counted(tmp_path):
    log = IntervalLog(tmp_path, "n1", 7, 100, ("n1:0", "n1:1"))
    log.extend(200, final=False)
    log.extend(300, final=True)
    IntervalLog(tmp_path, "n1", 7, 400, ("n1:0",)).extend(450, final=False)
    with (tmp_path / "n1-7-400.jsonl").open("ab") as file:
        file.write(b'{"type":"AgentInterval","now')
    assert [(i.gpu, i.start_us, i.end_us, i.final) for i in read_intervals(tmp_path)] == [
        ("n1:0", 100, 300, True),
        ("n1:1", 100, 300, True),
        ("n1:0", 400, 450, False),
    ]


def test_a_fault_point_ends_its_process_once(tmp_path):
    program = (
        "import sys, pathlib; from plexrl.pool.faults import Faults; f = Faults(pathlib.Path(sys.argv[1]));"
        "f.hit('other'); print('alive', flush=True); f.hit('here'); print('still', flush=True)"
    )
    run = [sys.executable, "-c", program, str(tmp_path)]
    (tmp_path / "faults").mkdir()
    (tmp_path / "faults" / "here").touch()
    first, second = (subprocess.run(run, capture_output=True, text=True, timeout=60) for _ in range(2))
    assert (first.returncode, first.stdout) == (-9, "alive\n")
    assert (second.returncode, second.stdout) == (0, "alive\nstill\n")
