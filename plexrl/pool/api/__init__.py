"""Commands of one peer into answers: authorises, gives ids, removes repeats, accepts calls. Never schedules itself.

Repeats are known by the keys that are stable across the SDK's retries: (model, seq) for training calls, (sampling
session, seq) for samples, (session, seq) for creations, the idempotency header for sessions.
"""

from plexrl.pool.api.access import Access
from plexrl.pool.api.checkpoints import Checkpoints
from plexrl.pool.api.futures import Futures
from plexrl.pool.api.intake import Intake
from plexrl.pool.api.looks import Looks
from plexrl.pool.api.models import Models
from plexrl.pool.api.sampling import Sampling
from plexrl.pool.api.sessions import Sessions
from plexrl.pool.api.training import Training
from plexrl.pool.core import Core
from plexrl.pool.deployments import Deployments
from plexrl.pool.groups import Groups
from plexrl.pool.progress import Progress
from plexrl.pool.turns import Turns
from plexrl.types import Peer, answers, commands

__all__ = ["Api"]


class Api:
    """Answers commands for authenticated peers. Each part has a method for every verb that it knows.

    progress: what engine hosts tell of samples that are not over.
    """

    def __init__(self, core: Core, groups: Groups, turns: Turns, deployments: Deployments):
        access, intake = Access(core), Intake(core)
        self.progress = Progress(core)
        self._training = Training(core, access, intake, deployments)
        models = Models(core, access, deployments)
        futures = Futures(core, groups, turns, models, self.progress)
        parts = (
            Sessions(core, access, deployments),
            models,
            self._training,
            Sampling(core, access, intake, deployments, turns),
            futures,
            Looks(core, futures),
            Checkpoints(core, access),
        )
        verbs = [command.verb for command in commands.AnyCommand.__args__]
        self._answers = {verb: getattr(part, verb) for part in parts for verb in verbs if hasattr(part, verb)}

    async def answer(self, peer: Peer, command: commands.Command) -> answers.AnyAnswer:
        """Raises ApiError for what the peer may not do or has got wrong."""
        return await self._answers[command.verb](peer, command)

    def consume(self, peer: Peer, model_id: str, seq: int) -> None:
        """A training call was refused before it became a command: its seq_id will not come again."""
        self._training.consume(peer, model_id, seq)
