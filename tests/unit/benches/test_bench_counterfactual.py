"""bench.counterfactual: a run on a pool gives both figures of its job. No timing is asserted."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from bench.counterfactual import Seen, jobs, row, run


@pytest.mark.timeout(400)
def test_a_run_tells_both_walls(tiny_model: Path, tmp_path: Path):
    work = replace(jobs(2)[2], groups=2, samples=2, max_tokens=4, tool_s=0.0)
    seen = run(tmp_path / "pool", tiny_model, [work])["lag"]
    # a step: a publication, two samples, a training call, an optim_step
    assert seen.calls == 2 * 5
    assert 0 < seen.replayed_s and 0 < seen.wall_s and seen.fit_error >= 0


def test_a_row_holds_within_five_per_cent_or_the_repeats_own_spread():
    work, lag = jobs(2)[0], jobs(2)[2]
    alone = [Seen(wall, wall, 0.1, 9) for wall in (99.0, 100.0, 101.0)]
    near, far = ([Seen(150.0, value, 0.2, 9)] for value in (104.0, 107.0))
    assert row(work, alone, near)["holds"] and not row(work, alone, far)["holds"]
    assert row(work, [*alone, Seen(108.0, 1, 0.1, 9)], far)["holds"]
    told = row(lag, alone, far)
    assert (told["kind"], told["holds"], told["replay_error"]) == ("bound", None, 0.07)
    assert (told["measured_seconds"], told["repeat_spread"], told["fit_error"]) == (100.0, 0.02, 0.2)
