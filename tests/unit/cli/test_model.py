"""`plexrl model`: a folder that loads, made in one step, and left alone afterwards."""

import json

from safetensors import safe_open
from typer.testing import CliRunner

from plexrl.cli.model import app
from plexrl.types import BadInput


def test_tiny_model_is_whole(tiny_model):
    config = json.loads((tiny_model / "config.json").read_text())
    with safe_open(tiny_model / "model.safetensors", "pt") as tensors:
        embedding = tensors.get_slice("model.embed_tokens.weight").get_shape()
    assert embedding == [config["vocab_size"], config["hidden_size"]]
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert [path for path in tiny_model.parent.iterdir() if path != tiny_model] == []
    assert tiny_model.stat().st_mode & 0o777 == 0o755


def test_tokens_are_bytes(tiny_model):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    text = "größer\n<|im_start|>"
    tokens = tokenizer.encode(text)
    assert len(tokens) == len(text.removesuffix("<|im_start|>").encode()) + 1
    assert tokenizer.decode(tokens) == text


def test_made_once(tiny_model):
    before = (tiny_model / "model.safetensors").stat().st_mtime_ns
    assert CliRunner().invoke(app, ["tiny", str(tiny_model)]).exit_code == 0
    assert (tiny_model / "model.safetensors").stat().st_mtime_ns == before


def test_a_folder_with_something_else_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").touch()
    result = CliRunner().invoke(app, ["tiny", str(tmp_path)])
    assert isinstance(result.exception, BadInput)
    assert (tmp_path / "thesis.tex").exists()


def test_a_folder_without_tokenizer_is_refused(tmp_path):
    result = CliRunner().invoke(app, ["tiny", str(tmp_path / "new"), "--tokenizer", str(tmp_path)])
    assert isinstance(result.exception, BadInput)
    assert not (tmp_path / "new").exists()
