"""plexrl.yaml is read as written, and every fault names file, line, key and the mend."""

import json
from math import inf
from pathlib import Path

import pytest

from plexrl.config import load
from plexrl.types import BadInput


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"max_position_embeddings": 2048}))
    (model / "tokenizer_config.json").write_text("{}")
    (model / "model.safetensors").touch()
    return model


@pytest.fixture
def write(tmp_path: Path, folder: Path):
    def write(text: str) -> Path:
        path = tmp_path / "plexrl.yaml"
        path.write_text(text.replace("MODEL", str(folder)))
        return path

    return write


SMALLEST = "state_dir: /var/lib/plexrl/lab\nmodels:\n  tiny:\n    path: MODEL\n"


def test_defaults(write, folder):
    config = load(write(SMALLEST))
    model = config.models["tiny"]
    assert (model.path, model.engine, model.dtype, model.max_context) == (str(folder), "auto", "float32", 512)
    assert (model.train.gpus, model.sample.replicas, model.sample.kv_bytes) == (1, 1, 128 * 2**20)
    assert model.allows("anybody")
    assert config.scheduler.quantum_us == 20_000_000
    assert (config.scheduler.order, config.scheduler.placement) == ("hrrs", "pack")
    assert config.scheduler.max_stretch.scavenger == inf
    assert (config.device.roles, config.shares, config.tenants) == ({}, {}, {})
    assert config.limits.sequence_gap_us == 330_000_000
    assert config.device.core("n1", 1) == 1
    assert config.munge_socket is None and config.nvme is None


def test_everything_written_out(write):
    config = load(
        write(
            SMALLEST
            + "    accounts: [ml, bio]\n    dtype: bfloat16\n    train: {gpus: 2}\n"
            + "    sample: {replicas: 2, kv_bytes: 64MiB}\n"
            + "device: {bytes: 1.5GiB, cores: {n2: [1]}, roles: {n1: [train, any]}}\nhost: {bytes: 4096}\n"
            + "nvme: {path: /scratch/lab, bytes: 2TiB}\n"
            + "scheduler:\n  {placement: isolated, anticipation: 70ms, quantum: 0.5, min_turn_factor: 2,\n"
            + "   half_life: 2d, max_stretch: {normal: .inf, scavenger: 8}, gather_share: 1}\n"
            + "shares: {ml: {shares: 2, users: {alice: 0}}}\ntenants: {bio: {class: interactive, deadline: 30s}}\n"
            + "munge_socket: /run/munge.socket\n"
        )
    )
    model = config.models["tiny"]
    assert model.accounts == ("ml", "bio") and model.allows("bio") and not model.allows("chem")
    assert (config.device.bytes, config.device.core("n2", 0), config.device.core("n1", 0)) == (3 * 2**29, 1, 0)
    assert (config.scheduler.anticipation_us, config.scheduler.quantum_us) == (70_000, 500_000)
    assert config.scheduler.half_life_us == 2 * 86_400_000_000
    assert (config.nvme.path, config.nvme.bytes) == ("/scratch/lab", 2**41)
    stretch = config.scheduler.max_stretch
    assert (stretch.interactive, stretch.normal, stretch.scavenger) == (2.0, inf, 8.0)
    assert config.device.roles == {"n1": ("train", "any")}
    assert (config.shares["ml"].shares, config.shares["ml"].users) == (2.0, {"alice": 0.0})
    standing = config.tenants["bio"]
    assert (standing.kind, standing.priority, standing.deadline_us) == ("interactive", 0, 30_000_000)


@pytest.mark.parametrize(
    ("text", "line", "key", "mend"),
    [
        (SMALLEST + "    train: {gpu: 2}\n", 5, "models.tiny.train.gpu", "Did you mean `gpus`?"),
        (SMALLEST + "schedular: {}\n", 5, "schedular", "Did you mean `scheduler`?"),
        (SMALLEST + "scheduler: {quantum_us: 5}\n", 5, "scheduler.quantum_us", "Did you mean `quantum`?"),
        (SMALLEST + "    train: {gpus: two}\n", 5, "models.tiny.train.gpus", "without quotes"),
        (SMALLEST + "    train: {gpus: 0}\n", 5, "models.tiny.train.gpus", "above 0"),
        (SMALLEST + "    train: {gpus: true}\n", 5, "models.tiny.train.gpus", "without quotes"),
        (SMALLEST + "    train: [2]\n", 5, "models.tiny.train", "Indent its keys"),
        (SMALLEST + "    lora: {slots: -1}\n", 5, "models.tiny.lora.slots", "above 0"),
        (SMALLEST + "    engine: magic\n", 5, "models.tiny.engine", "'auto', 'torch' or 'noop'"),
        (SMALLEST + "    accounts: ml\n", 5, "models.tiny.accounts", "[a, b]"),
        (SMALLEST + "    max_context: 4096\n", 5, "models.tiny.max_context", "at most 2048"),
        (SMALLEST + "    sample: {kv_bytes: 4GiB}\n", 5, "models.tiny.sample.kv_bytes", "device.bytes"),
        (SMALLEST + "\n\nhost:\n  bytes: 6 parsecs\n", 8, "host.bytes", "KiB"),
        (SMALLEST + "limits:\n  session_timeout: soon\n", 6, "limits.session_timeout", "50ms"),
        (SMALLEST + "device: {cores: {n1: [0, 0]}}\n", 5, "device", "own core"),
        (SMALLEST + "scheduler: {paranoid: 'no'}\n", 5, "scheduler.paranoid", "true or false"),
        (SMALLEST + "scheduler: {order: best}\n", 5, "scheduler.order", "'hrrs'"),
        (SMALLEST + "scheduler: {gather_share: 1.5}\n", 5, "scheduler.gather_share", "1.0 or less"),
        (SMALLEST + "scheduler:\n  max_stretch: {normal: 0.5}\n", 6, "scheduler.max_stretch.normal", "1.0 or more"),
        (SMALLEST + "scheduler:\n  max_stretch:\n    norm: 2\n", 7, "scheduler.max_stretch.norm", "`normal`"),
        (
            SMALLEST + "scheduler: {interactive_switches_per_hour: many}\n",
            5,
            "scheduler.interactive_switches_per_hour",
            "without quotes",
        ),
        (SMALLEST + "device:\n  roles: {n1: [gpu]}\n", 6, "device.roles.n1[0]", "'train', 'sample' or 'any'"),
        (SMALLEST + "shares:\n  ml: {share: 1}\n", 6, "shares.ml.share", "Did you mean `shares`?"),
        (SMALLEST + "shares:\n  ml: 2\n", 6, "shares.ml", "Indent its keys"),
        (SMALLEST + "shares: {ml: {users: {alice: -1}}}\n", 5, "shares.ml.users.alice", "0.0 or more"),
        (SMALLEST + "shares: {ml: {shares: 1.0e-9}}\n", 5, "shares.ml.shares", "0.000001"),
        (SMALLEST + "tenants:\n  ml:\n    kind: normal\n", 7, "tenants.ml.kind", "class, priority, deadline"),
        (SMALLEST + "tenants: {ml: {class: batch}}\n", 5, "tenants.ml.class", "'scavenger'"),
        (SMALLEST + "tenants: {ml: {deadline: 0}}\n", 5, "tenants.ml.deadline", "above 0"),
        (SMALLEST + "state_dir: /again\n", 5, "state_dir", "lines 1 and 5"),
        (SMALLEST.replace("/var", "var"), 1, "state_dir", "absolute"),
        (SMALLEST.replace("state_dir: /var/lib/plexrl/lab\n", ""), 1, "state_dir", "Add `state_dir: ...`"),
        (SMALLEST.replace("MODEL", "/no/such/folder"), 4, "models.tiny.path", "plexrl model smollm2"),
        (SMALLEST.replace("tiny", "../tiny"), 3, "models.../tiny", "letters"),
        (SMALLEST + "nvme: {path: /scratch}\n", 5, "nvme.bytes", "Add `bytes: ...`"),
        (SMALLEST + "nvme:\n  path: scratch\n  bytes: 1GiB\n", 6, "nvme.path", "Correct the value"),
        (SMALLEST + "nvme:\n  path: /scratch\n  bytes: 0\n", 7, "nvme.bytes", "Correct the value"),
        (SMALLEST + "nvme:\n  path: /scratch\n  size: 1GiB\n", 7, "nvme.size", "Keys here: path, bytes"),
        (SMALLEST + "nvme:\n  path: /var/lib/plexrl/lab/x\n  bytes: 1GiB\n", 6, "nvme.path", "own disk"),
        ("state_dir: /x\nmodels: {}\n", 2, "models", "at least one"),
    ],
)
def test_fault_is_named(write, text, line, key, mend):
    path = write(text)
    with pytest.raises(BadInput) as caught:
        load(path)
    assert f"{path}:{line}: {key}: " in str(caught.value)
    assert mend in str(caught.value)


def test_all_faults_are_named_in_the_order_of_the_file(write):
    path = write("state_dir: rel\nmodels: {}\nhosts: 1\n")
    with pytest.raises(BadInput) as caught:
        load(path)
    assert [line.split(": ")[0] for line in str(caught.value).splitlines()] == [f"{path}:{n}" for n in (1, 2, 3)]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: [1\n", "not YAML"),
        ("- a\n", "not a mapping"),
        ("", "Add `models: ...`"),
        ("x: !!python/name:os.system\n", "YAML"),
    ],
)
def test_not_a_config_at_all(write, text, said):
    with pytest.raises(BadInput, match=said):
        load(write(text))


def test_missing_file(tmp_path):
    with pytest.raises(BadInput, match="cannot be read"):
        load(tmp_path / "absent.yaml")


def test_incomplete_model_folder_is_named_file_by_file(write, folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(BadInput, match=r"lacks \*.safetensors"):
        load(write(SMALLEST))


def test_noop_needs_no_model_files(write, folder):
    (folder / "config.json").unlink()
    assert load(write(SMALLEST + "    engine: noop\n")).models["tiny"].engine == "noop"


def test_real_gpus(write):
    config = load(write(SMALLEST + "device: {kind: cuda, bytes: 70GiB, cores: {n2: [7]}}\n"))
    assert config.device.kind == "cuda"
    # Ranks of a real GPU run where they like, unless the site says where.
    assert (config.device.core("n1", 1), config.device.core("n2", 0)) == (None, 7)
    assert load(write(SMALLEST)).device.kind == "cpu"


def test_another_kind_of_device_is_refused_where_it_stands(write):
    path = write(SMALLEST + "device:\n  bytes: 3GiB\n  kind: rocm\n")
    with pytest.raises(BadInput) as refused:
        load(path)
    assert refused.value.what == f"{path}:7: device.kind: not a known value"
    assert refused.value.mend == "Write 'cpu' or 'cuda'"
