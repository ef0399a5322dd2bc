"""How a request is answered while there is no head, by what the clients' own retries make of a status.

`tinker` repeats a poll at once on 408, silently; it takes 402 for a pause, says so once a minute and tries again every
5 s for up to an hour, but only in calls that go through its outer retry loop; the create calls only back off on 429,
for ten tries. A 503 would be repeated without any sleep, for ever. `openai` backs off on 429.
"""

from enum import Enum

import msgspec

from plexrl.attach.settings import Holds


class Kind(Enum):
    """A class of requests that are held alike."""

    POLL = "poll"
    SUBMIT = "submit"
    CREATE = "create"
    BRIEF = "brief"


_KINDS = {
    "retrieve_future": Kind.POLL,
    "retrieve_futures": Kind.POLL,
    "/plexrl/v1/drawn": Kind.POLL,
    "asample": Kind.SUBMIT,
    "client/config": Kind.SUBMIT,
    "forward_backward": Kind.SUBMIT,
    "get_info": Kind.SUBMIT,
    "load_weights": Kind.SUBMIT,
    "optim_step": Kind.SUBMIT,
    "save_weights": Kind.SUBMIT,
    "save_weights_for_sampler": Kind.SUBMIT,
    # Sent beside the work, with timeouts of 5 to 10 s and no retries.
    "cancel_future": Kind.BRIEF,
    "session_heartbeat": Kind.BRIEF,
    "telemetry": Kind.BRIEF,
}
_TINKER = "/api/v1/"


def kind_of(path: str) -> Kind:
    """The class of a request to the head; what is not known is held like a create call."""
    name = path.removeprefix(_TINKER).partition("?")[0]
    if name.startswith("samplers/"):
        return Kind.SUBMIT
    return _KINDS.get(name, Kind.CREATE)


def limit(kind: Kind, holds: Holds) -> float:
    """Seconds that a request of this class is held without a head."""
    return getattr(holds, kind.value)


class _Poll(msgspec.Struct):
    request_id: str = ""


_poll = msgspec.json.Decoder(_Poll)


def given_up(kind: Kind, why: str, body: bytes) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body for a request whose hold is over. why: what is missing, for the user."""
    if kind is Kind.POLL:
        try:
            request_id = _poll.decode(body).request_id
        except msgspec.MsgspecError:
            request_id = ""  # the head will say what is wrong with this poll when there is one
        answer = {
            "type": "try_again",
            "request_id": request_id,
            "queue_state": "paused_capacity",
            "queue_state_reason": why,
        }
        return 408, _JSON, msgspec.json.encode(answer)
    if kind is Kind.SUBMIT:
        return 402, _JSON, detail(f"paused, not a matter of money: {why}")
    return 429, {**_JSON, "retry-after-ms": "1000"}, detail(why)


def detail(text: str) -> bytes:
    """The body of an error, in the form that both SDKs print."""
    return msgspec.json.encode({"detail": text})


_JSON = {"content-type": "application/json"}
