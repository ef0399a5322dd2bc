"""Service models out of recorded calls."""

import pytest

from plexrl.accounting.busy import Busy
from plexrl.accounting.fit import fits
from plexrl.types import CallKind, Role
from tests.unit.accounting.scene import Scene

TRAIN, OPTIM, SAMPLE = CallKind.FORWARD_BACKWARD, CallKind.OPTIM_STEP, CallKind.SAMPLE


def fitted(scene):
    return fits(scene.records, Busy(scene.records))


def test_training_is_told_by_its_tokens():
    scene = Scene()
    scene.place(5, "t", Role.TRAIN)
    at = 10.0
    for number, tokens in enumerate((100, 200, 400, 100)):
        scene.call(at, "11.0", f"t:{2 * number}", "t", TRAIN)
        scene.span("n1:0", at, at + tokens / 100, "busy", "t/0", j11_0=1)
        at += tokens / 100
        scene.end(at, "11.0", f"t:{2 * number}", cpu=tokens / 100, gang="t/0", units=tokens)
        scene.call(at, "11.0", f"t:{2 * number + 1}", "t", OPTIM)
        scene.span("n1:0", at, at + 0.5, "busy", "t/0", j11_0=1)
        at += 0.5
        scene.end(at, "11.0", f"t:{2 * number + 1}", cpu=0.5, gang="t/0", units=1)
    found = fitted(scene)["t"]
    assert found.error == pytest.approx(0, abs=1e-6) and found.observed == 8
    assert found.call_us(TRAIN, 300) == pytest.approx(3_000_000, rel=1e-3)
    assert found.call_us(OPTIM, 1) == pytest.approx(500_000, rel=1e-3)


def test_time_in_which_others_had_the_gpu_is_not_service():
    scene = Scene()
    scene.place(5, "t", Role.TRAIN)
    for number, gap in enumerate((0, 30)):
        at = 10 + 100 * number
        scene.call(at, "11.0", f"t:{number}", "t", TRAIN)
        scene.span("n1:0", at, at + 2, "busy", "t/0", j11_0=1)
        scene.span("n1:0", at + 2 + gap, at + 4 + gap, "busy", "t/0", j11_0=1)
        scene.end(at + 4 + gap, "11.0", f"t:{number}", cpu=4, gang="t/0", wall=4 + gap)
    found = fitted(scene)["t"]
    assert found.call_us(TRAIN, 10) == pytest.approx(4_000_000, rel=1e-3)
    assert found.served_us == found.cpu_us == 8_000_000


def test_a_burst_is_told_by_prompts_steps_and_sequences():
    """Calls of two sequences: 10 ms a prompt token, steps of 100 ms and 20 ms for each sequence."""
    scene = Scene()
    scene.place(5, "s", Role.SAMPLE)
    at = 10.0
    for burst, (calls, prompt, length) in enumerate(((1, 10, 50), (2, 10, 20), (4, 40, 30), (3, 20, 10))):
        seconds = calls * prompt * 0.01 + length * (0.1 + 0.02 * 2 * calls)
        scene.span("n1:0", at, at + seconds, "busy", "s/0", j11_0=1)
        for call in range(calls):
            scene.call(at, "11.0", f"s:{burst}:{call}", "s", SAMPLE, prompt_tokens=prompt, sequences=2)
        for call in range(calls):
            scene.end(at + seconds, "11.0", f"s:{burst}:{call}", cpu=seconds, gang="s/0", units=prompt + 2 * length)
        at += seconds + 1
    found = fitted(scene)["s"]
    assert found.observed == 4 and found.error < 0.01
    assert found.service.step_us(4) == pytest.approx(180_000, rel=0.02)
    assert found.service.prefill_us_per_token == pytest.approx(10_000, rel=0.05)


def test_calls_that_failed_or_never_ran_teach_nothing():
    scene = Scene()
    scene.place(5, "t", Role.TRAIN)
    scene.call(10, "11.0", "t:0", "t", TRAIN)
    scene.end(11, "11.0", "t:0", cpu=1, gang="")
    assert fitted(scene) == {}


@pytest.mark.parametrize("pretend", [True, False])
def test_contended_cores_do_not_make_a_baseline_larger(pretend):
    """Nine of ten calls took three times as long as they computed: on pretend GPUs the tenth tells what alone means."""
    scene = Scene()
    scene.place(5, "t", Role.TRAIN)
    at = 10.0
    for number in range(10):
        wall = 1.1 if number == 4 else 3.0
        scene.call(at, "11.0", f"t:{number}", "t", TRAIN)
        scene.span("n1:0", at, at + wall, "busy", "t/0", j11_0=1)
        at += wall
        scene.end(at, "11.0", f"t:{number}", cpu=1, gang="t/0", wall=wall)
    found = fits(scene.records, Busy(scene.records), pretend)["t"]
    assert found.call_us(TRAIN, 10) == pytest.approx(1_100_000 if pretend else 2_810_000, rel=0.01)
    assert found.served_us / found.cpu_us == pytest.approx(2.81)  # and the report says how contended they were
