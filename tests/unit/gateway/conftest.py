"""A gateway for a pool of one small model, the fake head behind it, and an unmodified SDK client before it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import tinker

from plexrl.config import PoolConfig
from plexrl.gateway import TinkerGateway
from tests.unit.gateway.fakehead import FakeHead, serve


@pytest.fixture(scope="module")
def gateway() -> TinkerGateway:
    models = {"smol": {"path": "/models/smol", "max_context": 512, "lora": {"max_rank": 32}}}
    return TinkerGateway(PoolConfig(state_dir="/nowhere", models=models))


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> FakeHead:
    return FakeHead(str(_tokenizer(tmp_path_factory.mktemp("model"))))


@pytest.fixture(scope="module")
def service(gateway: TinkerGateway, head: FakeHead) -> Iterator[tinker.ServiceClient]:
    with serve(gateway, head) as url, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TINKER_TELEMETRY", "0")
        client = tinker.ServiceClient(base_url=url, api_key="tml-test")
        yield client
        client.close(status="success").result()


def _tokenizer(folder: Path) -> Path:
    """A tokenizer of four words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({"one": 0, "two": 1, "three": 2, "?": 3}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?").save_pretrained(folder)
    return folder
