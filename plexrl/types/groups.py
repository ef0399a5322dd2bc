"""Worker groups, their gangs and where they are placed. A GPU is named `<node>:<index>`."""

from msgspec import Struct

from plexrl.types.words import JobClass, Role


class Extent(Struct, frozen=True):
    """A worker group's place in one GPU's memory. offset is None where the device gives stable virtual addresses."""

    offset: int | None
    size: int


class GroupSpec(Struct, frozen=True, kw_only=True):
    """A worker group as it is asked for.

    gang_size: GPUs per gang. replicas: gangs (1 for role train). device_bytes: per GPU of a gang.
    owner: the job that caused it, charged for the build.
    host_bytes: host memory per GPU of a gang, for its state when it is off the device. residual_bytes: device bytes per
    GPU that stay as long as its processes live (contexts, graphs, communicators), resident or not.
    duty: expected share of the time that a gang of it is busy when its job runs alone, 0 to 1; None: a prior by role.
    """

    group: str
    role: Role
    owner: str
    gang_size: int
    replicas: int
    device_bytes: int
    host_bytes: int = 0
    residual_bytes: int = 0
    duty: float | None = None


class Gang(Struct, frozen=True):
    """One replica of a worker group on its GPUs; rank i runs on gpus[i]. Id: `<group>/<replica>`."""

    id: str
    group: str
    gpus: tuple[str, ...]
    extents: tuple[Extent, ...]


class Placement(Struct, frozen=True):
    """Where the gangs of a worker group live, for the group's whole life (affinity)."""

    group: str
    gangs: tuple[Gang, ...]


class Tenant(Struct, frozen=True, kw_only=True):
    """Who a job is to the scheduler.

    priority: higher first within a class. deadline_us: the longest that a call of it should wait before it begins.
    """

    job: str
    account: str = ""
    user: str = ""
    kind: JobClass = JobClass.NORMAL
    priority: int = 0
    deadline_us: int | None = None
