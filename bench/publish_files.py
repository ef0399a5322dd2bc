"""A weight update by way of a file: what `bench.publish` is measured against."""

import json
import shutil
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from plexrl.engines import layout
from plexrl.engines.torch.lora import Shape, peft_config
from plexrl.types import PlexrlError

logging.disable_progress_bar()
warnings.filterwarnings("ignore", module="peft")  # about tied heads; nothing is merged here


class Files:
    """The reference: a sampler of the plain libraries that takes its weights from a folder."""

    def __init__(self, model: str, rank: int | None, folder: Path) -> None:
        self._folder = folder
        self._rank = rank
        self._place: dict[str, torch.Tensor] = {}
        self._file = folder / ("model.safetensors" if rank is None else "adapter_model.safetensors")
        if rank is None:
            shutil.copyfile(Path(model) / "config.json", folder / "config.json")
            return
        shape, arch = Shape(rank, True, True, True), layout.architecture(model)
        (folder / "adapter_config.json").write_text(json.dumps(peft_config(shape, arch, model)))
        self._model: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)

    def reload(self, tensors: dict[str, torch.Tensor], name: str) -> float:
        """Seconds of a save and a reload. name: of an adapter in the model."""
        begun = time.perf_counter()
        save_file(tensors, self._file, {"format": "pt"})
        if self._rank is None:
            model = AutoModelForCausalLM.from_pretrained(self._folder, dtype=torch.bfloat16)
        elif isinstance(self._model, PeftModel):
            model = self._model
            model.load_adapter(self._folder, name)
            model.set_adapter(name)
        else:
            model = self._model = PeftModel.from_pretrained(self._model, self._folder, name)
        seconds = time.perf_counter() - begun
        held = model.state_dict()
        for key, tensor in tensors.items():
            if not torch.equal(held[key.replace(".weight", f".{name}.weight") if self._rank else key], tensor):
                raise PlexrlError(f"{key} that came through the file is not what was published", "Report this")
        if self._rank is not None:
            for old in [other for other in model.peft_config if other != name]:
                model.delete_adapter(old)
        return seconds

    def in_place(self, tensors: dict[str, torch.Tensor]) -> float:
        """Seconds of the least that a file costs."""
        place = self._place = self._place or {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
        begun = time.perf_counter()
        save_file(tensors, self._file, {"format": "pt"})
        for name, tensor in load_file(self._file).items():
            place[name].copy_(tensor)
        return time.perf_counter() - begun
