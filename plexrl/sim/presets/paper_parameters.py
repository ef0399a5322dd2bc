"""Parameters of the preset `paper`, frozen before its first run: they were committed before any simulation was made.

Marks: [paper] read of PlexRL (arXiv 2605.20863) or of a summary of it; [facts] from another public source, as the
project's collection of facts has it; [ours] chosen by us. Whatever is [ours] moves the result: the sensitivity grid
shows by how much.

How the published bubble ratios are read [ours]. 80.10 / 70.67 / 81.11 % is the "share of time not computing"; of which
pool and under which baseline is not said. Read over all GPUs it contradicts itself: with R/(R+T) = 1/3 rollout GPUs
alone, busy as they are in a run that is bound by its rollouts, would leave less than that idle. So it is read as the
training pool's under split-async, and the training share of a step is 1 - ratio: 0.1990, 0.2933, 0.1889. The time of
a training token follows: mean training time = share x mean length of a rollout (what a step takes there), computed
from drawn steps, not from a simulation.
"""

from msgspec import Struct

GB = 1_000_000_000


class Setting(Struct, frozen=True, kw_only=True):
    """One model of the paper's end-to-end experiment; two jobs of it share the training pool.

    train_gpus: TP x PP x DP. sample_gpus: rollout GPUs of a job. bubble: published share of time not computing.
    published: saving in GPU-hours per step against split-async, two jobs, training pool shared.
    state_bytes, weight_bytes: of the whole model; bf16 weights, mixed-precision Adam. replica_gpus: of one sampler.
    decode_base_us, decode_sequence_us: one decode step of a replica takes base + sequence x batch.
    """

    model: str
    train_gpus: int
    sample_gpus: int
    bubble: float
    published: float
    state_bytes: int
    weight_bytes: int
    replica_gpus: int
    prompts: int
    group: int
    max_tokens: int
    mean_tokens: int
    decode_base_us: float
    decode_sequence_us: float
    prefill_us_per_token: float
    publish_us: float

    @property
    def train_share(self) -> float:
        """Training's share of a step of split-async."""
        return 1.0 - self.bubble


SETTINGS = (
    Setting(
        model="7B",
        train_gpus=16,  # [paper] TP 2, PP 4, DP 2
        sample_gpus=8,  # [facts] 1.9: near the largest that the published saving allows
        bubble=0.8010,  # [paper]
        published=0.3136,  # [paper]
        state_bytes=122 * GB,  # [facts] 5.7: 16 bytes per parameter
        weight_bytes=15 * GB,  # [facts] 5.7
        replica_gpus=1,  # [ours]
        prompts=64,  # [facts] 7.2: 64 x 8
        group=8,
        max_tokens=8_192,  # [facts] 7.2: 8k to 64k for reasoning; the smallest for an Instruct model [ours]
        mean_tokens=2_500,  # [ours]
        decode_base_us=7_000.0,  # [ours] weights at 3.35 TB/s are 4.5 ms; with 64 sequences the rate is
        decode_sequence_us=50.0,  # [facts] 7.2: 6,300 tokens/s
        prefill_us_per_token=25.0,  # [ours] 40 % of 990 TFLOP/s
        publish_us=2_000_000.0,  # [facts] 5.5: 4 to 7 s for 100 to 235B on 8 GPUs; shorter here [ours]
    ),
    Setting(
        model="30B-A3B",
        train_gpus=128,  # [paper] EP 8, TP 2, PP 8, DP 8
        sample_gpus=64,  # [facts] 1.9
        bubble=0.7067,  # [paper]
        published=0.3010,  # [paper]
        state_bytes=488 * GB,  # [facts] 5.7
        weight_bytes=61 * GB,  # [facts] 5.7
        replica_gpus=2,  # [ours]
        prompts=128,  # [ours] between 64 and 400 of [facts] 7.2
        group=16,  # [facts] 7.2: 8 to 16
        max_tokens=32_768,  # [facts] 7.2: 32k; a Thinking model
        mean_tokens=9_000,  # [ours]
        decode_base_us=12_000.0,  # [ours] 30 GB per GPU at 3.35 TB/s are 9 ms: a batch touches all experts
        decode_sequence_us=40.0,  # [ours]
        prefill_us_per_token=6.0,  # [ours]
        publish_us=7_000_000.0,  # [facts] 5.5: 7 s
    ),
    Setting(
        model="235B",
        train_gpus=96,  # [paper] EP 8, TP 8, PP 12, DP 1
        sample_gpus=24,  # [facts] 1.9
        bubble=0.8111,  # [paper]
        published=0.3758,  # [paper]
        state_bytes=3_760 * GB,  # [facts] 5.7
        weight_bytes=470 * GB,  # [facts] 5.7
        replica_gpus=8,  # [ours]
        prompts=64,  # [facts] 7.2
        group=8,
        max_tokens=16_384,  # [facts] 7.2; an Instruct model [ours]
        mean_tokens=5_000,  # [ours]
        decode_base_us=22_000.0,  # [ours] 59 GB per GPU at 3.35 TB/s are 17.5 ms
        decode_sequence_us=60.0,  # [ours]
        prefill_us_per_token=12.0,  # [ours]
        publish_us=7_000_000.0,  # [facts] 5.5: 6.75 s
    ),
)

SIGMA_PROMPT = 0.7  # [facts] 7.2: 0.6 to 0.8
SIGMA_SAMPLE = 0.4  # [facts] 7.2: 0.3 to 0.5
DRIFT = 0.05  # [ours] sd of the AR(1) drift of the mean per step; [facts] 7.2 says only that it drifts
LAG = 1  # [paper] split-async allows one step

SWITCH_GBPS = 24.0  # [facts] 5.7: PCIe 4 pinned, or PCIe 5 with 4 to 8 GPUs copying at once (2 to 4 times below 55)
SWITCH_EXCHANGE = False  # [ours] out, then in: the dearer reading of 5.7
SWITCH_OVERHEAD_US = 300_000.0  # [facts] 7.4: a warm switch takes 0.3 to 6 s with its bytes
GPU_BYTES = 64 * GB  # [ours] what 80 GB leave for states beside activations, workspaces and KV cache
HOST_BYTES = 2_000 * GB  # [facts] 7.4: 1 to 2 TB per node of 8 GPUs
RESIDUAL_BYTES = 2 * GB  # [ours] contexts, communicators and graphs of a sleeping process, per GPU
BUILD_US = 80_000_000  # [facts] 7.4: 47 to 98 s, 80 s

STEPS = 40  # [ours] per job; what is measured ends when the first job is done
SEEDS = (1, 2, 3, 4, 5)  # [ours]
JOBS = (2, 3, 4)

RIGHT_SIZED_DUTY = 0.9  # [ours] a right-sized split: fewest training GPUs that hold the state, busy at most so much
SHARED_ALL_DUTY = 0.9  # [ours] a pool of all GPUs is sized for this share of busy time, in whole nodes of 8
STAGGER = True  # [ours] jobs start apart by a k-th of a step: nobody submits two jobs in the same second

GRID_DUTY = (0.1, 0.2, 0.3, 0.4, 0.5)  # the sensitivity grid: training's share of a step ...
GRID_VARIATION = (0.0, 0.1, 0.2, 0.3, 0.5)  # ... and the variation (sd/mean) of the lengths of steps
