"""vLLM's engine core in this process: its environment, its settings, and what we keep it from doing."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock

import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers the backend

from plexrl.engines import layout
from plexrl.engines.protocol import EngineSpec
from plexrl.engines.vllm import sizing
from plexrl.types import BadInput, DoesNotFit, PlexrlError

if TYPE_CHECKING:
    from vllm.v1.engine.core_client import InprocClient

# Tokens that one step reads at most beside those it draws: steps bound a pause's delay.
PREFILL_TOKENS = 1024

_ENVIRON = {
    # The engine core runs in this process, and its one worker too.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # The agent has pinned this process to its pretend GPU's core.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # What ours reaches into, on GPUs too.
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_PLUGINS": "",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_CONFIGURE_LOGGING": "0",
}


def launch(spec: EngineSpec, arch: layout.Architecture) -> InprocClient:
    """Read the model and make the engine; its memory is still vLLM's own.

    Raises BadInput for what vLLM refuses, DoesNotFit when the node has no memory for it.
    """
    private = Path(tempfile.mkdtemp(prefix="plexrl-vllm-"))
    cache = Path(spec.cache_dir, "vllm") if spec.cache_dir else private / "cache"
    cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # it would overrule kv_bytes
    os.environ.update(_ENVIRON | {"VLLM_CACHE_ROOT": str(cache), "VLLM_CONFIG_ROOT": str(cache)})
    logging.getLogger("vllm").setLevel(logging.ERROR)
    try:
        with _tamed(private):
            return _launch(spec, arch)
    except PlexrlError:
        raise
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise DoesNotFit(f"vLLM found no memory for {spec.model_dir}: {_first(error)}", _LESS) from error
    except Exception as error:
        if "memory" in str(error).lower():
            raise DoesNotFit(f"vLLM found no memory for {spec.model_dir}: {_first(error)}", _LESS) from error
        raise BadInput(
            f"vLLM cannot serve {spec.model_dir}: {type(error).__name__}: {_first(error)}",
            "Write sample.engine: torch for this model",
        ) from error
    finally:
        shutil.rmtree(private, ignore_errors=True)


_LESS = "Lower sample.kv_bytes, or run fewer engines on this node"


def _launch(spec: EngineSpec, arch: layout.Architecture) -> InprocClient:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.core_client import InprocClient
    from vllm.v1.executor import Executor

    from plexrl.engines.vllm import sleepmode

    lora: dict[str, object] = {}
    if spec.kind == "lora":
        targets = {module.rpartition(".")[2] for module in layout.adapted(arch, True, True, True)}
        lora = {
            "enable_lora": True,
            "max_loras": spec.lora_slots,
            "max_cpu_loras": spec.lora_slots,
            "max_lora_rank": sizing.rank_of(spec.lora_max_rank),
            # As they are trained, whatever the base is.
            "lora_dtype": torch.float32,
            "lora_target_modules": sorted(_fused(targets)),
        }
    arguments = EngineArgs(
        model=spec.model_dir,
        skip_tokenizer_init=True,
        trust_remote_code=False,
        generation_config="vllm",
        load_format="safetensors",
        use_tqdm_on_load=False,
        dtype=spec.dtype,
        enforce_eager=True,
        max_model_len=spec.max_context,
        max_num_seqs=spec.max_batch,
        max_num_batched_tokens=max(PREFILL_TOKENS, spec.max_batch),
        kv_cache_memory_bytes=sizing.blocks(arch, spec.dtype, spec.kv_bytes) * sizing.block_bytes(arch, spec.dtype),
        block_size=sizing.BLOCK,
        distributed_executor_backend="uni",
        async_scheduling=False,
        disable_log_stats=True,
        # Logprobs of the draw are those of the logits as the model gave them, whatever temperature and top_p are.
        logprobs_mode="raw_logprobs",
        max_logprobs=-1,
        # Replicas must not draw alike; who wants the same again gives a seed.
        seed=secrets.randbits(31),
        **lora,
    )
    config = arguments.create_engine_config()
    sleepmode.register(config)
    client = InprocClient(config, Executor.get_class(config), log_stats=False)
    # It would take the process's groups with it, which another engine in here may still need.
    client._finalizer.detach()
    return client


def _fused(modules: set[str]) -> set[str]:
    """As vLLM names the modules that it makes of these."""
    fused = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj"}
    fused |= {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj"}
    return {fused.get(module, module) for module in modules}


@contextlib.contextmanager
def _tamed(private: Path) -> Iterator[None]:
    """While vLLM is imported and built; afterwards the process is as it was.

    * Weights stay in tensors: oneDNN's handlers would keep them, packed anew, in memory that nobody can move.
    * Its process groups have one rank and are fake ones: gloo's would each listen on a port. They meet in a file of
      ours, not in one beside everybody's in /tmp.
    * A model's class is looked at here and not in a child process (which costs seconds and a second import).
    * Rotary tables belong to one engine: the next one in this process makes its own.
    """
    import vllm._custom_ops as ops
    from vllm.model_executor.layers import rotary_embedding
    from vllm.model_executor.models import registry
    from vllm.platforms import current_platform
    from vllm.v1.executor import uniproc_executor

    def portless(make: Callable) -> Callable:
        return lambda *args, **kwargs: make(*args, **kwargs | {"backend": "fake"})

    set_num_threads, state = torch.set_num_threads, random.getstate()
    try:
        with (
            mock.patch.object(ops, "_supports_onednn", False),
            mock.patch.object(registry, "_run_in_subprocess", lambda look: look()),
            mock.patch.object(registry._LazyRegisteredModel, "_save_modelinfo_to_cache", lambda *_: None),
            mock.patch.object(type(current_platform), "dist_backend", "fake"),
            mock.patch.object(dist, "init_process_group", portless(dist.init_process_group)),
            mock.patch.object(dist, "new_group", portless(dist.new_group)),
            mock.patch.object(uniproc_executor, "get_file_store_init_method", lambda: f"file://{private / 'store'}"),
            mock.patch.dict(rotary_embedding._ROPE_DICT, clear=True),
        ):
            yield
    finally:
        torch.set_num_threads = set_num_threads
        random.setstate(state)


def _first(error: BaseException) -> str:
    """The line of a long message that says something."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:300] if lines else "no message"
