"""ForwardBackwardRequest into arrays, a plan for the ranks, and results into ForwardBackwardOutput."""

from __future__ import annotations

import math

import numpy as np
from google.protobuf.message import DecodeError
from msgspec import Struct
from tinker.proto import tinker_public_pb2 as pb

from plexrl.engines.losses import LOSSES, sampled_runs
from plexrl.engines.losses import settings as loss_settings
from plexrl.engines.protocol import UserError
from plexrl.types import BadInput

# Targets of one request, of all its tokens and the k of each.
MAX_CELLS = 1 << 24


class Datum(Struct, frozen=True):
    """One sequence. tokens: int64 (n). targets: int64 (n, k). inputs: float32 (n, k) each, by name, none left out.

    shape: that of target_tokens as sent, (n) or (n, k); the output has it too.
    """

    tokens: np.ndarray
    targets: np.ndarray
    inputs: dict[str, np.ndarray]
    shape: tuple[int, ...]


class Batch(Struct, frozen=True):
    """A request's loss and its loss_fn_config with all defaults, its sequences and their number of tokens."""

    loss: str
    settings: dict[str, float]
    data: tuple[Datum, ...]
    units: int


def parse(body: bytes, vocabulary: int, max_context: int) -> Batch:
    """Raises UserError naming the datum and field that is wrong."""
    try:
        request = pb.ForwardBackwardRequest.FromString(body)
    except DecodeError as error:
        raise UserError(f"malformed ForwardBackwardRequest: {error}") from error
    try:
        settings = loss_settings(request)
    except BadInput as error:
        raise UserError(error.what, error.mend) from error
    if not request.data:
        raise UserError("the request holds no data", "Send at least one datum")
    data: list[Datum] = []
    cells = 0
    for index, datum in enumerate(request.data):
        data.append(_datum(index, datum, request.loss_fn, settings, vocabulary, max_context))
        cells += data[-1].targets.size
        if cells > MAX_CELLS:
            # Sparse tensors are small on the wire and large here.
            raise UserError(f"the targets have more than {MAX_CELLS} cells up to datum {index}", "Send less at once")
    return Batch(request.loss_fn, settings, tuple(data), sum(len(datum.tokens) for datum in data))


def plan(lengths: list[int], world: int, budget: int) -> list[list[list[int]]]:
    """Micro-batches per rank, as indices of datums; every rank computes the same plan and gets as many micro-batches.

    Longest first to the rank with the least work, then packed so that rows x longest row stays within budget (a single
    longer datum goes alone). A rank with less to do has empty micro-batches at its end.
    """
    shares: list[list[int]] = [[] for _ in range(world)]
    load = [0] * world
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        rank = min(range(world), key=lambda r: (load[r], r))
        shares[rank].append(index)
        load[rank] += lengths[index]
    plans = []
    for share in shares:
        batches: list[list[int]] = []
        for index in share:
            if batches and lengths[batches[-1][0]] * (len(batches[-1]) + 1) <= budget:
                batches[-1].append(index)
            else:
                batches.append([index])
        plans.append(batches)
    most = max(len(batches) for batches in plans)
    return [batches + [[]] * (most - len(batches)) for batches in plans]


def stub(batch: Batch) -> Datum:
    """One token that the loss does not depend on: for a rank that has nothing to do while others have."""
    inputs = dict.fromkeys(batch.data[0].inputs, np.zeros((1, 1), np.float32))
    return Datum(np.zeros(1, np.int64), np.zeros((1, 1), np.int64), inputs, (1,))


def output(batch: Batch, logprobs: list[np.ndarray], loss: float) -> bytes:
    """logprobs: float32 (n, k) per datum, in request order. One record per run of equally shaped targets."""
    message = pb.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord", metrics={"loss:sum": loss})
    start = 0
    while start < len(batch.data):
        trailing = batch.data[start].shape[1:]
        end = start
        while end < len(batch.data) and batch.data[end].shape[1:] == trailing:
            end += 1
        record = message.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=end - start)
        field = record.fields["logprobs"]
        sizes = [array.nbytes for array in logprobs[start:end]]
        field.data = b"".join(array.tobytes() for array in logprobs[start:end])
        field.offsets = np.concatenate(([0], np.cumsum(sizes))).astype("<i8").tobytes()
        field.dtype = pb.DTYPE_FLOAT32
        field.trailing_shape.extend(trailing)
        start = end
    return message.SerializeToString()


def _datum(
    index: int, datum: pb.Datum, loss: str, settings: dict[str, float], vocabulary: int, max_context: int
) -> Datum:
    where = f"datum {index}"
    chunks = []
    for chunk in datum.model_input:
        if chunk.WhichOneof("chunk") != "encoded_text":
            raise UserError(f"{where}: {chunk.WhichOneof('chunk')} chunks are not built yet", "Send encoded text")
        if len(chunk.encoded_text.tokens) % 4:
            raise UserError(f"{where}: tokens are not whole int32 numbers", "Send little-endian int32")
        chunks.append(np.frombuffer(chunk.encoded_text.tokens, "<i4"))
    tokens = np.concatenate(chunks).astype(np.int64) if chunks else np.zeros(0, np.int64)
    if not len(tokens):
        raise UserError(f"{where}: no input tokens", "Send at least one")
    if len(tokens) > max_context:
        raise UserError(f"{where}: {len(tokens)} tokens exceed the context of {max_context}", "Send shorter sequences")
    _in_vocabulary(f"{where}: input token", tokens, vocabulary)
    asked = LOSSES[loss]
    arrays = {}
    for name in sorted(datum.loss_fn_inputs):
        if name not in ("target_tokens", *asked.needs, *asked.takes):
            raise UserError(f"{where}: {loss} does not use {name!r}", f"It takes {asked.names}")
        arrays[name] = _dense(f"{where}: {name}", datum.loss_fn_inputs[name])
    for name in ("target_tokens", *asked.needs):
        if name not in arrays:
            raise UserError(f"{where}: {loss} needs {name!r}", f"It takes {asked.names}")
    targets = arrays.pop("target_tokens")
    shape = targets.shape
    if targets.dtype != np.int64 or targets.ndim not in (1, 2) or shape[0] != len(tokens) or 0 in shape:
        raise UserError(
            f"{where}: target_tokens {targets.dtype}{list(shape)} for {len(tokens)} tokens", "Send one int64 each"
        )
    if targets.ndim == 2 and not asked.several:
        raise UserError(f"{where}: several targets per position are for cross_entropy only", "Send one")
    _in_vocabulary(f"{where}: target token", targets, vocabulary)
    for name, array in arrays.items():
        if array.shape != shape or array.dtype != np.float32:
            raise UserError(f"{where}: {name} is {array.dtype}{list(array.shape)}", f"Send float32 {list(shape)}")
        if not np.isfinite(array).all():
            raise UserError(f"{where}: {name} holds NaN or infinity", "Send finite numbers")
    try:
        _complete(where, datum, loss, settings, arrays, shape)
    except BadInput as error:
        raise UserError(error.what, error.mend) from error
    rows = {name: array.reshape(len(tokens), -1) for name, array in arrays.items()}
    return Datum(tokens, targets.reshape(len(tokens), -1), rows, shape)


def _complete(
    where: str,
    datum: pb.Datum,
    loss: str,
    settings: dict[str, float],
    arrays: dict[str, np.ndarray],
    shape: tuple[int, ...],
) -> None:
    """Fill in what was left out, and what follows from the provenance. Raises BadInput."""
    if loss == "cross_entropy":
        arrays.setdefault("weights", np.ones(shape, np.float32))
    for name, setting in LOSSES[loss].settings.items():
        if name not in LOSSES[loss].takes:
            continue
        if name in arrays:
            setting.check(f"{where}: a {name}", arrays[name].min(), arrays[name].max())
        else:
            arrays[name] = np.full(shape, settings[name], np.float32)
    if loss == "gspo":
        counts = arrays["advantages"] != 0
        mask = arrays.setdefault("sequence_ratio_mask", counts.astype(np.float32))
        if counts.any() and not mask.any():
            raise BadInput(f"{where}: sequence_ratio_mask marks no position", "Mark the sampled ones with 1")
    if loss == "stable_reinforce":
        runs = sampled_runs(where, datum)
        if sum(length for _, length in runs) != shape[0]:
            raise BadInput(f"{where}: provenance does not tile its {shape[0]} targets", "Use Datum.with_provenance")
        arrays["sampled"] = np.repeat(*np.array(runs, np.int64).T).astype(np.float32)
        odd = np.flatnonzero((arrays["advantages"] != 0) & (arrays["sampled"] == 0))
        if len(odd):
            raise BadInput(f"{where}: position {odd[0]} has an advantage and was not sampled", "Give it advantage 0")


def _in_vocabulary(what: str, tokens: np.ndarray, vocabulary: int) -> None:
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= vocabulary:
        raise UserError(f"{what} {low if low < 0 else high} is outside the vocabulary", f"Use 0 to {vocabulary - 1}")


def _dense(what: str, tensor: pb.Tensor) -> np.ndarray:
    """A dense or CSR wire tensor as a dense array."""
    dtype = {pb.DTYPE_FLOAT32: "<f4", pb.DTYPE_INT64: "<i8"}.get(tensor.dtype)
    if dtype is None:
        raise UserError(f"{what}: unknown dtype {tensor.dtype}", "Send FLOAT32 or INT64")
    shape = tuple(tensor.shape)
    try:
        if tensor.WhichOneof("encoding") == "sparse_csr":
            return _from_csr(tensor.sparse_csr, dtype, shape)
        array = np.frombuffer(tensor.dense, dtype)
        return array.reshape(shape if shape else (len(array),))
    except (ValueError, IndexError) as error:
        raise UserError(f"{what}: data and shape {list(shape)} do not agree: {error}") from error


def _from_csr(csr: pb.SparseCsr, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    if len(shape) != 2 or math.prod(shape) > MAX_CELLS:
        raise ValueError("a CSR tensor has two dimensions of reasonable size")
    values = np.frombuffer(csr.values, dtype)
    rows = np.frombuffer(csr.crow_indices, "<i8")
    columns = np.frombuffer(csr.col_indices, "<i8")
    counts = np.diff(rows)
    if len(rows) != shape[0] + 1 or rows[0] != 0 or rows[-1] != len(values) or (counts < 0).any():
        raise ValueError("row pointers are not those of the values")
    if len(columns) != len(values) or (columns < 0).any():
        raise ValueError("column indices are not those of the values")
    dense = np.zeros(shape, dtype)
    dense[np.repeat(np.arange(shape[0]), counts), columns] = values
    return dense
