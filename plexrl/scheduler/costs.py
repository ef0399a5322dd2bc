"""What calls and switches cost: learned, modelled, fitted. The one model that scheduler, simulator and accounting read.

Times are microseconds. A gang is taken as a whole: its GPUs work, and move their bytes, at the same time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations

from msgspec import Struct

from plexrl.types import BadInput, CallKind

ALPHA = 0.3  # ours: the last three observations weigh two thirds

# Before anything has been seen of a job. sample: mean service of a request in production (Aegaeon, SOSP '25).
# forward_backward and optim_step: the pair of this project's own trials; forward is a third of forward_backward (no
# backward pass, which costs two forwards). The rest: ours.
CALL_PRIOR_US = {
    CallKind.SAMPLE: 16_800_000,
    CallKind.FORWARD: 700_000,
    CallKind.FORWARD_BACKWARD: 2_000_000,
    CallKind.OPTIM_STEP: 300_000,
    CallKind.SAVE_STATE: 1_000_000,
    CallKind.LOAD_STATE: 1_000_000,
    CallKind.PUBLISH: 1_000_000,
}


class Learned:
    """An exponentially weighted mean and mean absolute deviation of a duration (ours), in O(1) memory.

    The first observation counts as its own mean with half of it as deviation, as in RFC 6298 (TCP's timer).
    """

    __slots__ = ("_deviation", "_mean", "count")

    def __init__(self, prior_us: int = 0) -> None:
        self._mean: float = prior_us
        self._deviation = prior_us / 2
        self.count = 0

    def observe(self, us: int) -> None:
        """It took this long."""
        if self.count:
            self._deviation += ALPHA * (abs(us - self._mean) - self._deviation)
            self._mean += ALPHA * (us - self._mean)
        else:
            self._mean, self._deviation = us, us / 2
        self.count += 1

    @property
    def mean(self) -> int:
        """What to expect; the prior before the first observation."""
        return int(self._mean)

    @property
    def upper(self) -> int:
        """What is rarely exceeded: mean + 2 deviations; twice the prior before the first observation."""
        return int(self._mean + 2 * self._deviation)


class Observation(Struct, frozen=True, kw_only=True):
    """One recorded call.

    prompt_tokens: of a sample, prefilled once for all its sequences. tokens: drawn by all its sequences together, or
    worked on by a training call. batch: sequences that the gang decoded at the same time, on average.
    """

    kind: CallKind
    prompt_tokens: int = 0
    tokens: int = 0
    sequences: int = 1
    batch: float = 1
    seconds_us: int


class ServiceModel(Struct, frozen=True, kw_only=True):
    """How long a gang takes for a call, by the work in it.

    A decode step with b sequences takes decode_base_us + decode_us_per_sequence * b: the weights are read once per
    step, caches and arithmetic once per sequence. call_us: fixed overhead of each call.
    """

    prefill_us_per_token: float = 0.0
    decode_base_us: float = 0.0
    decode_us_per_sequence: float = 0.0
    train_us_per_token: float = 0.0
    forward_us_per_token: float = 0.0
    optim_us: float = 0.0
    call_us: float = 0.0

    def step_us(self, batch: float) -> float:
        """One decode step with so many sequences; a fraction, because it is added up over thousands of steps."""
        return self.decode_base_us + self.decode_us_per_sequence * batch

    def sample_us(self, prompt: int, tokens: int, batch: float) -> int:
        """A sample that prefills `prompt` tokens and then takes part in `tokens` decode steps of `batch` sequences."""
        return round(self.call_us + self.prefill_us_per_token * prompt + tokens * self.step_us(batch))

    def train_us(self, tokens: int) -> int:
        """A forward_backward over so many tokens."""
        return round(self.call_us + self.train_us_per_token * tokens)

    def forward_us(self, tokens: int) -> int:
        """A forward over so many tokens."""
        return round(self.call_us + self.forward_us_per_token * tokens)

    def step_optimizer_us(self) -> int:
        """An optim_step."""
        return round(self.call_us + self.optim_us)

    @classmethod
    def fit(cls, observations: Iterable[Observation]) -> tuple[ServiceModel, float]:
        """The model that predicts the calls best, and its mean relative error |predicted - seen| / seen.

        Non-negative least squares on relative errors, so that short calls count as much as long ones. The sequences of
        one sample are taken as equally long. Saves, loads and publications are not modelled and left out. What no
        observation tells of is 0. Raises BadInput when none is left.
        """
        seen = [o for o in observations if o.kind in _FEATURES and o.seconds_us > 0]
        if not seen:
            raise BadInput("no call to fit a service model to", "Record samples or training calls first")
        rows = [[value / o.seconds_us for value in _features(o)] for o in seen]
        weights = non_negative(rows)
        error = sum(abs(sum(w * x for w, x in zip(weights, row, strict=True)) - 1) for row in rows) / len(rows)
        return cls(**dict(zip(cls.__struct_fields__, weights, strict=True))), error


# Which coefficients a call has part in, by their place in ServiceModel.
_FEATURES = {
    CallKind.SAMPLE: lambda o: (o.prompt_tokens, (n := o.tokens / max(1, o.sequences)), n * o.batch, 0, 0, 0, 1),
    CallKind.FORWARD_BACKWARD: lambda o: (0, 0, 0, o.tokens, 0, 0, 1),
    CallKind.FORWARD: lambda o: (0, 0, 0, 0, o.tokens, 0, 1),
    CallKind.OPTIM_STEP: lambda o: (0, 0, 0, 0, 0, 1, 1),
}


def _features(observation: Observation) -> tuple[float, ...]:
    return _FEATURES[observation.kind](observation)


def non_negative(rows: Sequence[Sequence[float]]) -> list[float]:
    """The weights w >= 0 with the least sum over rows of (w . row - 1)^2. For a handful of columns.

    The optimum is the plain least-squares solution on its own support, so it is enough to try every support (exact;
    2^7 systems here). Of two equally good ones the smaller is taken, so that columns which cannot be told apart do not
    share one weight at random.
    """
    columns = list(zip(*rows, strict=True))
    norms = [sum(x * x for x in column) ** 0.5 for column in columns]
    used = [i for i, norm in enumerate(norms) if norm > 0]
    unit = {i: [x / norms[i] for x in columns[i]] for i in used}
    gram = {(i, j): sum(x * y for x, y in zip(unit[i], unit[j], strict=True)) for i in used for j in used}
    target = {i: sum(unit[i]) for i in used}
    best, chosen = float(len(rows)), {}
    for size in range(1, len(used) + 1):
        for support in combinations(used, size):
            solved = _solve([[gram[i, j] for j in support] + [target[i]] for i in support])
            if solved is None or min(solved) < 0:
                continue
            left = len(rows) - sum(w * target[i] for w, i in zip(solved, support, strict=True))
            if left < best - 1e-9 * len(rows):
                best, chosen = left, dict(zip(support, solved, strict=True))
    return [chosen[i] / norms[i] if i in chosen else 0.0 for i in range(len(columns))]


def _solve(system: list[list[float]]) -> list[float] | None:
    """Gauss-Jordan on [A | b] with A symmetric, unit diagonal. None when A is close to singular."""
    size = len(system)
    for i in range(size):
        pivot = max(range(i, size), key=lambda k: abs(system[k][i]))
        system[i], system[pivot] = system[pivot], system[i]
        if abs(system[i][i]) < 1e-10:
            return None
        system[i] = [x / system[i][i] for x in system[i]]
        for k in range(size):
            if k != i:
                factor = system[k][i]
                system[k] = [x - factor * y for x, y in zip(system[k], system[i], strict=True)]
    return [row[-1] for row in system]


def service_prior(parameters: float, gpus: int) -> ServiceModel:
    """A dense model of so many parameters on so many H100s, before anything of it has been measured.

    Roofline (ours): 990 TFLOP/s bf16 and 3.35 TB/s per GPU as NVIDIA states them, of which 40 % and 70 % are reached;
    2 FLOP per parameter and token forward, three times that with backward; decode reads 2 bytes per parameter and step.
    decode_us_per_sequence is set so that 128 sequences (ours) of a 7B model make the 6,300 tokens/s that Hugging Face's
    survey of asynchronous RL libraries gives for an H100 at full batch, and grows with the parameters.
    """
    forward = 2 * parameters / (0.4 * 990e6) / gpus
    return ServiceModel(
        prefill_us_per_token=forward,
        decode_base_us=2 * parameters / (0.7 * 3.35e6) / gpus,
        decode_us_per_sequence=(128e6 / 6300 - 2 * 7e9 / (0.7 * 3.35e6)) / 128 * parameters / 7e9 / gpus,
        train_us_per_token=3 * forward,
        forward_us_per_token=forward,
        optim_us=28 * parameters / (0.7 * 3.35e6) / gpus,  # reads and writes of Adam's mixed-precision state
        call_us=2_000,
    )


class SwitchModel(Struct, frozen=True, kw_only=True):
    """How long it takes to move state between a GPU and its host. Bytes are per GPU.

    gbps_in, gbps_out: GB (1e9 bytes) per second and GPU. overhead_us: of every switch, whatever it moves. exchange:
    both directions overlap, chunk by chunk.
    """

    gbps_in: float
    gbps_out: float
    overhead_us: int = 0
    exchange: bool = False

    def out_us(self, bytes_out: int) -> int:
        """The copy out alone."""
        return round(bytes_out / (self.gbps_out * 1e3))

    def in_us(self, bytes_in: int) -> int:
        """The copy in alone."""
        return round(bytes_in / (self.gbps_in * 1e3))

    def switch_us(self, bytes_in: int, bytes_out: int) -> int:
        """A whole switch: one in, another out."""
        copies = self.in_us(bytes_in), self.out_us(bytes_out)
        return self.overhead_us + (max(copies) if self.exchange else sum(copies))


# PCIe 4 x16 pinned, 24.4 GiB/s out and 23.5 in (torch_memory_saver issue 111); PCIe 5 has twice that (55 GB/s, NeMo-RL
# issue 3976), of which half is left when the GPUs of a node copy at once (vLLM's sleep mode figures: 21 -> 11 GB/s).
# overhead: an engine's own sleep and wake over a channel, 50 to 100 ms (llm-d time-slicing).
SWITCH_PRIOR = SwitchModel(gbps_in=24.0, gbps_out=24.0, overhead_us=100_000, exchange=True)


def hrrs(wait_us: int, service_us: int, switch_us: int, factor: float) -> float:
    """The score of order `hrrs`, highest first: factor * (wait + service + switch) / (service + switch).

    Ours: the paper names HRRS and its formula is not public. switch_us: 0 when the gang is resident. Service is not
    taken below the switch that it would pay for, nor below 1 us: else the shortest calls would switch all the time.
    """
    work = max(service_us, switch_us, 1) + switch_us
    return factor * (wait_us + work) / work


def anticipation_us(think: Learned, prior_us: int, switch_us: int) -> int:
    """How long a drained turn is kept for its job's next call while others wait (ours; ski rental).

    The prior while nothing is known of the job. Else as long as its next call nearly always takes to come, and a
    quarter more, because a program that always takes the same time is on time to the microsecond; but only when that
    costs no more than switching away and back would (or than the prior), else not at all.
    """
    if not think.count:
        return prior_us
    return think.upper * 5 // 4 if think.upper <= max(prior_us, switch_us) else 0
