"""Engines on a device whose memory comes and goes, over virtual memory of the host; the card holds one of them."""

import pytest

from plexrl.engines.parking import Meter
from plexrl.engines.protocol import build
from plexrl.memory import cuda_tensor
from plexrl.memory.cuda import CudaDevice
from plexrl.memory.cuda_seat import BackedSeat
from plexrl.memory.gate import Gate
from plexrl.types import Extent, Role
from tests.unit.engines import test_exchange as exchange
from tests.unit.engines import test_sample as sample
from tests.unit.engines.conftest import Node, _one_core, models
from tests.unit.memory.hostvmm import GRAIN, Card, HostVmm, LateMover

__all__ = ["_one_core", "models"]  # the fixtures
CHUNK = 2 * GRAIN


class Virtual(Node):
    """Its engines join with a CudaDevice and a backed seat each. devices: of all that joined."""

    def __init__(self, card: Card) -> None:
        super().__init__()
        self.card = card
        self.devices: list[CudaDevice] = []

    def join(self, model_dir: str, role: Role, kind: str, **more: object):
        spec = self.spec(model_dir, role, kind, **more)
        extent = Extent(spec.extent_offset, spec.extent_size)
        seat = Gate(self.gate_fd).seat(len(self.devices), f"gang{len(self.devices)}", extent)
        # The device's own size is its budget; the card is what there is.
        driver = HostVmm(self.card)
        driver.memory = lambda: (self.size, self.size)
        device = CudaDevice(self.size, driver, LateMover(), kind=cuda_tensor.CPU, chunk=CHUNK)
        self.devices.append(device)
        return build(spec, device, self.map, BackedSeat(seat, device))


def size_of(node: Node, model: str, kind: str) -> int:
    return node.spec(model, Role.TRAIN, kind).extent_size


@exchange.KINDS
def test_two_trainers_exchange_on_a_card_that_holds_one(models, rank):
    kind = "full" if rank is None else "lora"
    want = []
    for seed in (0, 50):
        alone = exchange.trainer(Node(), models["tied"], rank)
        want.append(([exchange.step(alone, seed + i) for i in range(2)], exchange.state(alone)))
    card = Card(size_of(Node(), models["tied"], kind) + 2 * CHUNK)
    node = Virtual(card)
    first = exchange.trainer(node, models["tied"], rank)
    left = first.offload()
    assert card.used == 0 and left.residual_bytes == 0
    second = exchange.trainer(node, models["tied"], rank)
    got = {0: [], 1: []}
    here, there, who = second, first, 1
    for turn in range(2):
        for _ in range(2):
            got[who].append(exchange.step(here, (0, 50)[who] + turn))
            exchange.cross(here, there)
            here, there, who = there, here, 1 - who
    for engine, number in ((here, who), (there, 1 - who)):
        if engine is there:
            exchange.cross(here, there)
        assert got[number] == want[number][0]
        assert exchange.same(exchange.state(engine), want[number][1])


def test_a_sampler_s_live_rows_survive(models, monkeypatch):
    monkeypatch.setattr(Meter, "costs", exchange.PARK)
    bodies = {str(i): sample.ask([5 + i, 6, 7], 2, max_tokens=10 + i, seed=i) for i in range(4)}
    alone = Node().join(models["tied"], Role.SAMPLE, "lora")
    for name, body in bodies.items():
        alone.add(name, None, body)
    want = sample.drain(alone)
    node = Virtual(Card(1 << 26))
    engine = node.join(models["tied"], Role.SAMPLE, "lora")
    for name, body in bodies.items():
        engine.add(name, None, body)
    found = {}
    while engine.live():
        found |= {call: result.body for call, result in engine.step()}
        engine.offload()
        assert node.card.used == 0
        engine.load_device()
    assert {name: response.SerializeToString() for name, response in want.items()} == found


def test_a_load_that_cannot_get_memory_is_undone(models):
    node = Virtual(Card(1 << 26))
    engine = exchange.trainer(node, models["tied"], None)
    exchange.step(engine, 0)
    kept = exchange.state(engine)
    engine.offload()
    node.devices[0]._driver.fail = {"create": 2}
    with pytest.raises(Exception, match="create was told to fail"):
        engine.load_device()
    engine.undo()
    assert node.card.used == 0
    engine.load_device()
    assert exchange.same(exchange.state(engine), kept)
