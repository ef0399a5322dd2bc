"""What a trainer's state survives: switches, pauses, bad calls, saving, several ranks."""

from __future__ import annotations

import json
import multiprocessing
import resource
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from tinker.proto import tinker_public_pb2 as pb

from plexrl.engines import layout
from plexrl.engines.protocol import UserError
from plexrl.engines.torch import batch, losses
from plexrl.memory.device import CpuDevice
from plexrl.types import BadInput, DoesNotFit, Role
from tests.unit.engines.conftest import VOCABULARY, Node, logprobs, loss, request, run, sft
from tests.unit.engines.test_train_full import ADAM

OPTIM = json.dumps({"adam_params": ADAM}).encode()
KINDS = pytest.mark.parametrize("rank", [None, 4], ids=["full", "lora"])


def trainer(node: Node, model_dir: str, rank: int | None, **more: object):
    kind = "full" if rank is None else "lora"
    engine = node.build(model_dir, Role.TRAIN, kind, **{"micro_batch_tokens": 24} | more)
    engine.create("d", node.state(model_dir, rank), rank, 3, True, True, True)
    return engine


def state(engine) -> dict[str, torch.Tensor]:
    bound, _ = engine._use(engine._deployments["d"])
    return {f"{b}.{k}": t.clone() for b, views in bound.views.items() for k, t in views.items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def leave(engine) -> None:
    """Off the device, somebody else there, and back."""
    engine.offload()
    engine._home.region.buffer.random_(generator=torch.Generator().manual_seed(1))
    engine.load_device()


@KINDS
def test_the_same_bits_with_and_without_switches(models: dict[str, str], rank: int | None) -> None:
    """Switches between calls, between micro-batches and with gradients live; bodies in the same chunks."""
    results = []
    for switching in (False, True):
        engine = trainer(Node(), models["tied"], rank)
        bodies = []
        for step in range(3):
            for chunk in range(2):
                generator = engine.forward_backward("d", request("cross_entropy", sft(step * 2 + chunk)), False)
                while True:
                    try:
                        next(generator)
                    except StopIteration as stop:
                        bodies.append(stop.value.body)
                        break
                    if switching:
                        leave(engine)
                if switching:
                    leave(engine)
            bodies.append(engine.optim_step("d", OPTIM).body)
            if switching:
                leave(engine)
        results.append((bodies, state(engine)))
    assert results[0][0] == results[1][0]
    assert same(results[0][1], results[1][1])


@KINDS
def test_after_optim_step_gradients_are_zero_and_do_not_move(models: dict[str, str], rank: int | None) -> None:
    engine = trainer(Node(), models["tied"], rank)
    run(engine.forward_backward("d", request("cross_entropy", sft(0)), False))
    arch = layout.architecture(models["tied"])
    one = layout.packed(layout.weight_specs(arch, "float32", rank, True, True, True))
    assert engine.offload().bytes_out == one  # gradients only: nothing was stepped yet
    engine.load_device()
    engine.optim_step("d", OPTIM)
    assert engine.offload().bytes_out == 3 * one + 64
    assert engine.load_device()


@KINDS
def test_no_training_tensor_lies_outside(models: dict[str, str], rank: int | None) -> None:
    node = Node()
    engine = trainer(node, models["tied"], rank)
    run(engine.forward_backward("d", request("cross_entropy", sft(0)), False))
    engine.optim_step("d", OPTIM)
    buffer = engine._home.region.buffer
    start, end = buffer.data_ptr(), buffer.data_ptr() + buffer.numel()
    bound, _ = engine._use(engine._deployments["d"])
    adam = bound.adam._adam
    tensors = list(engine._home.model.parameters())
    tensors += [p.grad for p in tensors if p.grad is not None]
    tensors += [p for group in adam.param_groups for p in group["params"]]
    tensors += [p.grad for group in adam.param_groups for p in group["params"]]
    tensors += [t for values in adam.state.values() for t in values.values()]
    assert len(tensors) > 40
    for tensor in tensors:
        assert start <= tensor.data_ptr() < end
        assert tensor.data_ptr() % 64 == 0


def test_importance_sampling(node: Node, models: dict[str, str]) -> None:
    """Loss values by definition from the returned logprobs; gradients by the chain rule through cross_entropy."""
    engine = trainer(node, models["tied"], 4)
    run(engine.forward_backward("d", request("cross_entropy", sft(9)), False))
    engine.optim_step("d", OPTIM)
    rng = np.random.default_rng(0)
    data = []
    for item in sft(1):
        length = len(item["tokens"])
        mask = (np.arange(length) >= length // 2).astype(np.float32)
        data.append(
            {
                "tokens": item["tokens"],
                "target_tokens": item["target_tokens"],
                "advantages": rng.normal(size=length).astype(np.float32) * mask,
                "logprobs": (rng.normal(size=length) - 8).astype(np.float32) * mask,
            }
        )
    result, _ = run(engine.forward_backward("d", request("importance_sampling", data), False))
    got = logprobs(result.body)
    ratios = [np.exp(lp.astype(np.float64) - d["logprobs"]) for lp, d in zip(got, data, strict=True)]
    want = -sum((r * d["advantages"]).sum() for r, d in zip(ratios, data, strict=True))
    assert loss(result.body) == pytest.approx(want, rel=1e-4)
    first = state(engine)
    bound, _ = engine._use(engine._deployments["d"])
    bound.grads.zero_()
    same_gradient = [
        {
            "tokens": d["tokens"],
            "target_tokens": d["target_tokens"],
            "weights": (r * d["advantages"]).astype(np.float32),
        }
        for d, r in zip(data, ratios, strict=True)
    ]
    run(engine.forward_backward("d", request("cross_entropy", same_gradient), False))
    for key, tensor in state(engine).items():
        if key.startswith("grads"):
            torch.testing.assert_close(tensor, first[key], rtol=1e-3, atol=1e-4 * float(first[key].abs().max()))


def test_several_targets_per_position_dense_and_csr(node: Node, models: dict[str, str]) -> None:
    engine = trainer(node, models["tied"], 4)
    plain = [sft(1)[1]]
    single, _ = run(engine.forward_backward("d", request("cross_entropy", plain), True))
    length = len(plain[0]["tokens"])
    second = np.random.default_rng(3).integers(3, VOCABULARY, length)
    weights = np.stack([plain[0]["weights"], np.full(length, 0.25, np.float32)], 1)
    wide = {
        "tokens": plain[0]["tokens"],
        "target_tokens": np.stack([plain[0]["target_tokens"], second], 1).astype(np.int64),
        "weights": weights,
    }
    dense = request("cross_entropy", [wide, plain[0]])
    message = pb.ForwardBackwardRequest.FromString(dense)
    for name in ("target_tokens", "weights"):
        array = wide[name]
        rows, columns = np.nonzero(array)
        message.data[0].loss_fn_inputs[name].CopyFrom(
            pb.Tensor(
                dtype=message.data[0].loss_fn_inputs[name].dtype,
                shape=array.shape,
                sparse_csr=pb.SparseCsr(
                    values=array[rows, columns].tobytes(),
                    crow_indices=np.concatenate(([0], np.cumsum((array != 0).sum(1)))).astype("<i8").tobytes(),
                    col_indices=columns.astype("<i8").tobytes(),
                ),
            )
        )
    results = [run(engine.forward_backward("d", body, True))[0].body for body in (dense, message.SerializeToString())]
    assert results[0] == results[1]
    got = logprobs(results[0])
    assert got[0].shape == (length, 2)
    assert got[1].shape == (length,)
    np.testing.assert_allclose(got[0][:, 0], logprobs(single.body)[0], atol=1e-4)
    np.testing.assert_allclose(got[1], logprobs(single.body)[0], atol=1e-4)
    want = -(got[0] * weights).sum() - (got[1] * plain[0]["weights"]).sum()
    assert loss(results[0]) == pytest.approx(want, rel=1e-4)


@KINDS
def test_a_loss_that_is_no_number_leaves_gradients_as_they_were(models: dict[str, str], rank: int | None) -> None:
    engine = trainer(Node(), models["tied"], rank)
    # The ratio exp(logprob - old) overflows in the second micro-batch only.
    data = [
        {
            "tokens": item["tokens"],
            "target_tokens": item["target_tokens"],
            "advantages": np.ones(len(item["tokens"]), np.float32),
            "logprobs": np.full(len(item["tokens"]), -200.0 if len(item["tokens"]) == 5 else -6.0, np.float32),
        }
        for item in sft(0)
    ]
    body = request("importance_sampling", data)
    for before in (False, True):
        if before:
            run(engine.forward_backward("d", request("cross_entropy", sft(1)), False))
        kept = state(engine)
        with pytest.raises(UserError, match="not finite"):
            run(engine.forward_backward("d", body, False))
        assert same(state(engine), kept)
    engine.optim_step("d", OPTIM)


def test_gradients_that_are_no_numbers_are_dropped(node: Node, models: dict[str, str]) -> None:
    engine = trainer(node, models["tied"], 4)
    run(engine.forward_backward("d", request("cross_entropy", sft(1)), False))
    bound, _ = engine._use(engine._deployments["d"])
    bound.grads[3] = torch.inf
    kept = state(engine)
    with pytest.raises(UserError, match="gradients are not finite"):
        engine.optim_step("d", OPTIM)
    now = state(engine)
    assert all(torch.equal(now[key], kept[key]) for key in kept if not key.startswith("grads"))
    assert all(not now[key].any() for key in now if key.startswith("grads"))


@KINDS
def test_save_and_load(models: dict[str, str], rank: int | None, tmp_path: Path) -> None:
    engine = trainer(Node(), models["tied"], rank)

    def steps(count: int) -> list[float]:
        found = []
        for seed in range(count):
            result, _ = run(engine.forward_backward("d", request("cross_entropy", sft(seed)), False))
            found.append(loss(result.body))
            engine.optim_step("d", OPTIM)
        return found

    steps(2)
    engine.save("d", tmp_path / "with", optimizer=True)
    engine.save("d", tmp_path / "without", optimizer=False)
    kept = state(engine)
    after = steps(3)
    end = state(engine)
    engine.load("d", tmp_path / "with", optimizer=True)
    assert same(state(engine), kept)
    leave(engine)
    assert steps(3) == after
    assert same(state(engine), end)
    run(engine.forward_backward("d", request("cross_entropy", sft(0)), False))
    engine.load("d", tmp_path / "without", optimizer=False)
    leave(engine)
    now = state(engine)
    for key, tensor in now.items():
        if key.startswith("weights"):
            assert torch.equal(tensor, kept[key])
        elif not key.startswith("rng"):
            assert not tensor.any()
    # Overwriting replaces the folder as a whole.
    engine.save("d", tmp_path / "with", optimizer=False)
    assert not (tmp_path / "with" / "optimizer.safetensors").exists()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["with", "without"]


def test_a_full_disk_leaves_the_old_state(node: Node, models: dict[str, str], tmp_path: Path) -> None:
    """The disk is full in the middle of the file (here: the file size limit of the process)."""
    engine = trainer(node, models["tied"], None)
    engine.save("d", tmp_path / "s", optimizer=False)
    old = (tmp_path / "s" / "model.safetensors").read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(old) // 2, limits[1]))
    try:
        with pytest.raises(DoesNotFit, match="disk is full"):
            engine.save("d", tmp_path / "s", optimizer=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert (tmp_path / "s" / "model.safetensors").read_bytes() == old
    assert [p.name for p in tmp_path.iterdir()] == ["s"]


def test_bad_bodies(node: Node, models: dict[str, str]) -> None:
    engine = trainer(node, models["tied"], 4)
    good = sft(0, (6,))[0]

    def body(**change: np.ndarray) -> bytes:
        return request("cross_entropy", [good | change])

    weights = good["weights"].copy()
    weights[1] = np.nan
    cases = [
        (b"\x0a\xff", "malformed"),
        (request("cross_entropy", []), "no data"),
        (request("ppo", [good]), "ppo does not use 'weights'"),
        (body(tokens=np.full(6, VOCABULARY)), "outside the vocabulary"),
        (body(target_tokens=np.full(6, -1, np.int64)), "outside the vocabulary"),
        (body(weights=weights), "NaN"),
        (body(weights=good["weights"][:4]), "weights is float32"),
        (body(mask=good["weights"]), "does not use 'mask'"),
        (body(tokens=good["tokens"][:4]), "target_tokens"),
        (request("cross_entropy", sft(0, (130,))), "exceed the context of 128"),
        (request("importance_sampling", [{k: v for k, v in good.items() if k != "weights"}]), "needs 'logprobs'"),
    ]
    for data, text in cases:
        with pytest.raises(UserError, match=text):
            run(engine.forward_backward("d", data, False))
    for params, text in (
        ({"learning_rate": -1.0}, "learning_rate"),
        ({"beta1": 1.0}, "beta1"),
        ({"learning_rate": "x"}, "malformed"),
        ({"lr": 1.0}, "malformed"),
    ):
        with pytest.raises(UserError, match=text):
            engine.optim_step("d", json.dumps({"adam_params": params}).encode())
    with pytest.raises(BadInput, match="no deployment"):
        run(engine.forward_backward("x", body(), False))


def test_forward_only_leaves_no_gradient(node: Node, models: dict[str, str]) -> None:
    engine = trainer(node, models["tied"], 4)
    kept = state(engine)
    ahead, _ = run(engine.forward_backward("d", request("cross_entropy", sft(0)), True))
    assert same(state(engine), kept)
    both, _ = run(engine.forward_backward("d", request("cross_entropy", sft(0)), False))
    assert loss(ahead.body) == pytest.approx(loss(both.body), rel=1e-5)


def test_plan_is_whole_and_even() -> None:
    rng = np.random.default_rng(0)
    for world in (1, 2, 3):
        lengths = rng.integers(1, 40, 23).tolist()
        plans = batch.plan(lengths, world, 64)
        assert len({len(p) for p in plans}) == 1
        assert sorted(i for p in plans for b in p for i in b) == list(range(23))
        assert all(len(b) * max(lengths[i] for i in b) <= 64 for p in plans for b in p if len(b) > 1)
    assert batch.plan([5], 2, 64) == [[[0]], [[]]]


def test_logprob_gradient_is_autograds() -> None:
    """The hand-written gradient, where only some positions need one, against plain log_softmax."""
    torch.manual_seed(0)
    head = torch.nn.Linear(8, 33)
    hidden = torch.randn(300, 8, requires_grad=True)
    targets = torch.randint(0, 33, (300, 2))
    weight = torch.randn(300, 2) * (torch.rand(300, 1) > 0.5)
    grads = []
    for plain in (True, False):
        hidden.grad = None
        head.zero_grad()
        if plain:
            got = torch.log_softmax(head(hidden), -1).gather(1, targets)
        else:
            got = losses.token_logprobs(hidden, head, targets, (weight != 0).any(-1))
        (got * weight).sum().backward()
        grads.append((got.detach(), hidden.grad.clone(), head.weight.grad.clone(), head.bias.grad.clone()))
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


# --- a gang of two ----------------------------------------------------------------------------------------------


def _rank(rank: int, node: Node, spec, slab, folder: Path, queue) -> None:
    """One rank: three steps with a pause in each, one call that fails on one rank only, a save."""
    import msgspec

    torch.set_num_threads(1)
    from plexrl.engines.protocol import build

    engine = build(
        msgspec.structs.replace(spec, rank=rank, base_fill=rank == 0), CpuDevice(node.device_fd, node.size), node.map
    )
    kind_rank = None if spec.kind == "full" else 4
    engine.create("d", slab, kind_rank, 3, True, True, True)
    bodies, yields = [], []
    for step in range(3):
        generator = engine.forward_backward("d", request("cross_entropy", sft(step)), False)
        count = 0
        while True:
            try:
                next(generator)
            except StopIteration as stop:
                bodies.append(stop.value.body)
                break
            count += 1
            assert engine.any_rank(rank == 1)
            engine.offload()
            engine.load_device()
        yields.append(count)
        bodies.append(engine.optim_step("d", OPTIM).body)
    kept = state(engine)
    overflow = [
        {
            "tokens": item["tokens"],
            "target_tokens": item["target_tokens"],
            "advantages": np.ones(len(item["tokens"]), np.float32),
            "logprobs": np.full(len(item["tokens"]), -200.0 if len(item["tokens"]) == 5 else -6.0, np.float32),
        }
        for item in sft(0)
    ]
    with pytest.raises(UserError, match="not finite"):
        run(engine.forward_backward("d", request("importance_sampling", overflow), False))
    assert same(state(engine), kept)
    one, _ = run(engine.forward_backward("d", request("cross_entropy", sft(7, (9,))), False))
    engine.save("d", folder / "saved", optimizer=True)
    engine.load("d", folder / "saved", optimizer=True)
    digest = {key: tensor.numpy().tobytes() for key, tensor in state(engine).items()}
    queue.put((rank, bodies, yields, one.body, digest))
    engine.close()


@KINDS
def test_a_gang_of_two(models: dict[str, str], rank: int | None, tmp_path: Path) -> None:
    """Two ranks end with equal states, and with the losses and (nearly) the weights of one rank alone."""
    kind = "full" if rank is None else "lora"
    node = Node()
    spec = node.spec(
        models["tied"], Role.TRAIN, kind, world=2, rendezvous=str(tmp_path / "store"), micro_batch_tokens=12
    )
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    nodes = [node, Node()]
    nodes[1].arena_fd, nodes[1].map = node.arena_fd, node.map
    slabs = [node.state(models["tied"], rank), node.state(models["tied"], rank)]
    ranks = [
        context.Process(target=_rank, args=(r, nodes[r], spec, slabs[r], tmp_path, queue), daemon=True)
        for r in range(2)
    ]
    for process in ranks:
        process.start()
    found = {item[0]: item[1:] for item in (queue.get(timeout=60) for _ in range(2))}
    for process in ranks:
        process.join(20)
        assert process.exitcode == 0
    assert found[0][1] == found[1][1]
    assert found[0][3] == found[1][3]
    assert all(body == b"" for body in found[1][0])
    alone = trainer(Node(), models["tied"], rank)
    for step in range(3):
        result, _ = run(alone.forward_backward("d", request("cross_entropy", sft(step)), False))
        assert loss(found[0][0][2 * step]) == pytest.approx(loss(result.body), rel=1e-4)
        for got, want in zip(logprobs(found[0][0][2 * step]), logprobs(result.body), strict=True):
            np.testing.assert_allclose(got, want, atol=2e-2)
        alone.optim_step("d", OPTIM)


@KINDS
@pytest.mark.parametrize("optimizer", [True, False], ids=["with-optimizer", "weights-only"])
def test_a_saved_state_is_loaded_while_others_have_the_device(
    models: dict[str, str], tmp_path: Path, rank: int | None, optimizer: bool
) -> None:
    first = trainer(Node(), models["tied"], rank)
    for _ in range(2):
        run(first.forward_backward("d", request("cross_entropy", sft(1)), False))
        first.optim_step("d", OPTIM)
    first.save("d", tmp_path / "kept", True)
    here, away = (trainer(Node(), models["tied"], rank) for _ in range(2))
    here.load("d", tmp_path / "kept", optimizer)
    away.offload()
    away.load("d", tmp_path / "kept", optimizer)
    away.load_device()
    for engine in (here, away):
        run(engine.forward_backward("d", request("cross_entropy", sft(2)), False))
        engine.optim_step("d", OPTIM)
    assert same(state(here), state(away))
