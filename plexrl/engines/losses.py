"""The losses of the Tinker API: which inputs and which loss_fn_config each takes, and the checks that need no tensors.

No torch here: the gateway reads this too. The formulas are in engines/torch/losses.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from msgspec import Struct
from tinker.proto import tinker_public_pb2 as pb

from plexrl.types import BadInput


class Setting(Struct, frozen=True):
    """A number of loss_fn_config: what it is when left out, its bounds (both allowed), and a note on its meaning."""

    default: float
    low: float
    high: float
    note: str = ""

    def check(self, where: str, *values: float) -> None:
        """Raises BadInput, `where` first, when one of the values is out of bounds."""
        for value in values:
            if not (math.isfinite(value) and self.low <= value <= self.high):
                raise BadInput(f"{where} is {value:g}", f"Give {self.low:g} to {self.high:g}{self.note}")


class LossInputs(Struct, frozen=True):
    """What a loss is given.

    needs, takes: loss_fn_inputs beside target_tokens that must and that may be there, float32 and shaped as these.
    settings: loss_fn_config by name; those that are also in `takes` can be given per position instead.
    several: there may be K targets per position, (N, K). spans: every datum needs provenance.
    """

    needs: tuple[str, ...]
    takes: tuple[str, ...] = ()
    settings: dict[str, Setting] = {}
    several: bool = False
    spans: bool = False

    @property
    def names(self) -> str:
        """Its loss_fn_inputs, for people."""
        return ", ".join(["target_tokens", *self.needs, *(f"{name} (optional)" for name in self.takes)])


_SAMPLED = ("logprobs", "advantages")
_CLIPS = ("clip_low_threshold", "clip_high_threshold")
_RATIO = ": it bounds the ratio itself, so 0.8 and 1.2 for an epsilon of 0.2"


def _clips(low: float, high: float) -> dict[str, Setting]:
    return {_CLIPS[0]: Setting(low, 0, 1, _RATIO), _CLIPS[1]: Setting(high, 1, 1e6, _RATIO)}


LOSSES = {
    "cross_entropy": LossInputs((), ("weights",), several=True),
    "importance_sampling": LossInputs(_SAMPLED),
    "ppo": LossInputs(_SAMPLED, _CLIPS, _clips(0.8, 1.2)),
    "cispo": LossInputs(_SAMPLED, _CLIPS, _clips(0.0, 4.0)),
    "dro": LossInputs(_SAMPLED, (), {"beta": Setting(0.05, 0, 1e6)}),
    "gspo": LossInputs(_SAMPLED, ("sequence_ratio_mask", *_CLIPS), _clips(0.8, 1.2)),
    "stable_reinforce": LossInputs(_SAMPLED, (), {"kl_coeff": Setting(0.01, 0, 1e6)}, spans=True),
}


def loss_inputs(name: str) -> LossInputs:
    """Raises BadInput for a name that is no loss, or one that runs in the client only."""
    if name in LOSSES:
        return LOSSES[name]
    if name == "custom":
        raise BadInput(
            "Custom losses on the server are not built in this version of PlexRL",
            "Use forward_backward_custom with a Python function: it runs in your program",
        )
    raise BadInput(f"{name[:80]!r} is no loss function", f"Use one of {', '.join(LOSSES)}")


def settings(request: pb.ForwardBackwardRequest) -> dict[str, float]:
    """The loss_fn_config of a request with defaults filled in. Raises BadInput naming the parameter.

    The SDK writes numbers into both maps and texts into v2 only; v2 counts where it is set.
    """
    known = loss_inputs(request.loss_fn).settings
    given: dict[str, float | str] = dict(request.loss_fn_config)
    if request.loss_fn_config_v2:
        v2 = request.loss_fn_config_v2.items()
        given = {name: value.text if value.WhichOneof("value") == "text" else value.number for name, value in v2}
    found = {name: setting.default for name, setting in known.items()}
    for name, value in sorted(given.items()):
        where = f"{name[:80]!r} in the loss_fn_config of {request.loss_fn}"
        if name not in known:
            raise BadInput(f"{where} is unknown", f"It takes {', '.join(known)}" if known else "It takes none")
        if isinstance(value, str):
            raise BadInput(f"{where} is the text {value[:80]!r}", "Give a number")
        known[name].check(where, value)
        found[name] = value
    return found


def check_spans(where: str, datum: pb.Datum, tokens: int) -> None:
    """Provenance, where a datum has it: both fields, tiled exactly. Raises BadInput."""
    given = (("model_input", datum.model_input_spans), ("loss_fn_inputs", datum.loss_fn_input_spans))
    if any(spans for _, spans in given):
        for name, spans in given:
            covered = sum(length for _, length in _runs(where, spans))
            if covered != tokens:
                raise BadInput(
                    f"{where}: the provenance of {name} covers {covered} of {tokens} positions",
                    "Give both fields runs that tile them exactly (Datum.with_provenance)",
                )


def sampled_runs(where: str, datum: pb.Datum) -> list[tuple[bool, int]]:
    """The targets' provenance as (sampled or given, length) in order. Raises BadInput when there is none."""
    if not datum.loss_fn_input_spans:
        raise BadInput(
            f"{where}: stable_reinforce needs provenance", "Say with Datum.with_provenance which tokens were sampled"
        )
    return list(_runs(where, datum.loss_fn_input_spans))


def _runs(where: str, spans: Iterable[pb.ProvenanceSpan]) -> Iterable[tuple[bool, int]]:
    for span in spans:
        kind = span.WhichOneof("span")
        run = getattr(span, kind) if kind else None
        if run is None or not run.sequence_id or run.length < 0 or run.offset < 0:
            raise BadInput(
                f"{where}: a provenance span without kind, sequence_id, or with a negative length or offset",
                "Give PromptProvenanceSpan or SampledProvenanceSpan",
            )
        yield kind == "sampled_tokens", run.length
