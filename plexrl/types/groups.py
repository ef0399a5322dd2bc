"""Worker groups, their gangs and where they are placed. A GPU is named `<node>:<index>`."""

from msgspec import Struct

from plexrl.types.words import Role


class Extent(Struct, frozen=True):
    """A worker group's place in one GPU's memory. offset is None where the device gives stable virtual addresses."""

    offset: int | None
    size: int


class GroupSpec(Struct, frozen=True, kw_only=True):
    """A worker group as it is asked for.

    gang_size: GPUs per gang. replicas: gangs (1 for role train). device_bytes: per GPU of a gang.
    owner: the job that caused it, charged for the build.
    """

    group: str
    role: Role
    owner: str
    gang_size: int
    replicas: int
    device_bytes: int


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
