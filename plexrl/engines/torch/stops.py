"""What ends a sequence beside its length: token ids and strings."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer

from plexrl.engines.protocol import UserError
from plexrl.engines.torch.asample import Params, Sequence


class Stops:
    """eos: the model's own ends. The tokenizer is read when the first stop string comes."""

    def __init__(self, model_dir: str) -> None:
        self._folder = Path(model_dir)
        self.eos = _eos(self._folder)
        self._tokenizer: Tokenizer | None = None

    def prepare(self, params: Params) -> None:
        """Be ready to find their strings. Raises UserError for a model that has no tokenizer."""
        if not params.stop_strings or self._tokenizer is not None:
            return
        path = self._folder / "tokenizer.json"
        if not path.is_file():
            raise UserError("this model has no tokenizer.json, so stop strings cannot be found", "Use stop token ids")
        self._tokenizer = Tokenizer.from_file(str(path))

    def hit(self, sequence: Sequence) -> bool:
        """Whether the newest token ends the sequence."""
        params = sequence.request.params
        if sequence.tokens[-1] in params.stop_tokens:
            return True
        if not params.stop_strings:
            return False
        # A token is at least one byte, so the newest one can complete no string that begins further back than this.
        reach = max(len(text.encode()) for text in params.stop_strings) + 8
        text = self._tokenizer.decode(sequence.tokens[-reach:], skip_special_tokens=False)
        return any(stop in text for stop in params.stop_strings)


def _eos(folder: Path) -> frozenset[int]:
    """generation_config.json's ids, else config.json's."""
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        found = json.loads(path.read_text()).get("eos_token_id") if path.is_file() else None
        if found is not None:
            return frozenset(found if isinstance(found, list) else [found])
    return frozenset()
