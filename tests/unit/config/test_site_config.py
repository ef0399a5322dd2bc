"""The annotated plexrl.yaml that sites copy is valid, and tells the defaults as they are."""

import re
from pathlib import Path

from plexrl.config import PoolConfig, load

ROOT = Path(__file__).parents[3]
TEXT = (ROOT / "site_config" / "plexrl.yaml").read_text(encoding="utf-8")


def test_it_loads(tmp_path, tiny_model):
    text = TEXT.replace("/models/SmolLM2-135M-Instruct", str(tiny_model))
    (tmp_path / "plexrl.yaml").write_text(text)
    config = load(tmp_path / "plexrl.yaml")
    assert list(config.models) == ["HuggingFaceTB/SmolLM2-135M-Instruct"]


def test_it_names_every_key():
    def keys(section):
        for name, field in section.model_fields.items():
            yield field.alias or name
            inner = field.annotation
            if hasattr(inner, "model_fields"):
                yield from keys(inner)

    from plexrl.config import Model, Nvme, Share, Standing

    written = set(re.findall(r"[{ #]*(\w+):", TEXT))
    assert {*keys(PoolConfig), *keys(Model), *keys(Nvme), *keys(Share), *keys(Standing)} - written == set()
