"""A model that finds no place within the bounds of slowdown waits for one, and gets it when somebody leaves."""

from .rawclient import Answer, HttpClient
from .test_head_killed import kill_head

ALONE = {"max_stretch": {"normal": 1}, "paranoid": True}


def pending(client: HttpClient, promise: Answer) -> dict:
    """What a poll says of a creation that waits."""
    found = client.post("retrieve_future", request_id=promise.json["request_id"])
    assert found.status == 408, found.body
    return found.json


def test_a_model_waits_for_its_place_through_a_change_of_the_head(local_pool):
    pool = local_pool(scheduler=ALONE)
    first, second, third = (HttpClient(pool) for _ in range(3))
    model = first.model(rank=None)
    waiting = second.ask_model(rank=None)
    assert waiting.status == 200
    why = pending(second, waiting)
    assert why["queue_state"] == "paused_capacity" and "for places" in why["queue_state_reason"]
    # Who is in goes on, with a sampler beside its trainer on the same GPU.
    assert not first.wait(first.train(model, 1)).failed
    assert not first.wait(first.publish(model, 2, "v")).failed
    sampler = first.sampler(path=f"tinker://{model}/sampler_weights/v")
    assert not first.wait(first.sample(sampler, 0)).failed

    gives_up = third.ask_model(rank=None)
    third.close()
    kill_head(pool)
    assert "for places" in pending(second, waiting)["queue_state_reason"]
    assert not first.wait(first.train(model, 3)).failed
    first.unload(model)
    assert "for places" in pending(second, waiting)["queue_state_reason"], "its version is still sampled from"
    first.close()
    assert second.wait(waiting, 120).json["model_id"]
    assert not second.wait(second.train(second.wait(waiting).json["model_id"], 1)).failed
    assert gives_up.status == 200
    second.close()


def test_a_model_that_waits_can_be_unloaded(local_pool):
    pool = local_pool(scheduler=ALONE)
    first, second = HttpClient(pool), HttpClient(pool)
    model = first.model(rank=None)
    waiting = second.ask_model(rank=None)
    pending(second, waiting)
    second.unload(waiting.json["model_id"])
    assert second.wait(waiting).failed
    later = second.ask_model(rank=None)
    first.unload(model)
    assert second.wait(later, 120).json["model_id"]
    first.close()
    second.close()
