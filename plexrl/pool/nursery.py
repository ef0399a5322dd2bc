"""Where engine hosts are born: one small process per agent that has imported the engines and forks a rank when asked.

Importing torch and transformers takes seconds of a core; a fork takes milliseconds and shares the libraries' pages.
The parent side never has more than one thread and never touches a device, so that forking it is safe.

Between agent and nursery runs a SOCK_SEQPACKET pair: orders with file descriptors one way, births and ends the other.
"""

import asyncio
import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import NoReturn

import msgspec
from msgspec import Struct

from plexrl.memory.transfer import ENVIRON

_PACKET = 1 << 20
_FDS = 8
# Head, proxies and the users' programs are served before the pretend GPUs.
_NICE = 10


class Birth(Struct, frozen=True, tag=True):
    """Order: fork a rank. core: the CPU it is pinned to; None: any.

    Descriptors travel beside it: log, then the rank's own.
    """

    number: int
    settings: bytes
    core: int | None
    fds: int


class Born(Struct, frozen=True, tag=True):
    """A rank runs."""

    number: int
    pid: int


class Died(Struct, frozen=True, tag=True):
    """A rank has ended; code as of subprocess: negative for a signal."""

    pid: int
    code: int


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Birth | Born | Died).decode


class Nursery:
    """The agent's side. died(pid, code) is called on the loop for every rank that ends, gone() if the nursery does."""

    def __init__(
        self, models: Sequence[str], died: Callable[[int, int], None], gone: Callable[[], None], kind: str = "cpu"
    ):
        """models: folders whose model classes are imported ahead. kind: of the devices that ranks will have."""
        self._died = died
        self._gone = gone
        self._waiting: dict[int, asyncio.Future] = {}
        self._count = 0
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-m", "plexrl.pool.nursery", str(theirs.fileno()), *models],
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                env=_environment(kind),
            )
        self._socket.setblocking(False)
        asyncio.get_running_loop().add_reader(self._socket, self._read)

    async def bear(self, settings: bytes, core: int | None, log: int, fds: Sequence[int]) -> int:
        """Fork a rank; its pid. Raises OSError. In it the given descriptors have the numbers of `rank_fds(n)`."""
        self._count += 1
        future = self._waiting[self._count] = asyncio.get_running_loop().create_future()
        order = _encode(Birth(self._count, settings, core, len(fds)))
        socket.send_fds(self._socket, [order], [log, *fds])
        return await future

    def close(self) -> None:
        """End the nursery; ranks that still run are the caller's to end first."""
        asyncio.get_running_loop().remove_reader(self._socket)
        self._socket.close()
        self._process.wait()

    def _read(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while packet := self._receive():
                match _decode(packet):
                    case Born(number=number, pid=pid):
                        self._waiting.pop(number).set_result(pid)
                    case Died(pid=pid, code=code):
                        self._died(pid, code)
            asyncio.get_running_loop().remove_reader(self._socket)
            for future in self._waiting.values():
                future.set_exception(ChildProcessError("the nursery ended"))
            self._waiting.clear()
            self._gone()

    def _receive(self) -> bytes:
        """The next packet; empty when the nursery has ended."""
        try:
            return self._socket.recv(_PACKET)
        except ConnectionResetError:
            return b""


def rank_fds(count: int) -> list[int]:
    """The numbers under which a rank finds its descriptors, in the order in which they were given."""
    return list(range(10, 10 + count))


def _environment(kind: str) -> dict[str, str]:
    keep = ("PATH", "HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "TMPDIR")
    # What a site says of its network, and where its MPS daemons listen.
    site = ("NCCL_", "CUDA_MPS_")
    return {k: v for k, v in os.environ.items() if k in keep or k.startswith(site)} | {
        **ENVIRON,
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        # Whoever imports accelerate imports DeepSpeed, and that settles at once for what it sees: here no GPU.
        "DS_ACCELERATOR": kind,
        # A driver that was spoken to does not survive a fork: here nobody sees a GPU, and who asks is answered by NVML.
        "CUDA_VISIBLE_DEVICES": "",
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    }


# -- the nursery's own process -----------------------------------------------------------------------------------------


def main() -> int:
    """Import, then fork until the agent goes away. argv: descriptor of the socket, model folders."""
    # To a low number: select(2) takes none above 1023, and a rank closes what lies below 100.
    agent = socket.socket(fileno=os.dup(int(sys.argv[1])))
    os.close(int(sys.argv[1]))
    _prepare(sys.argv[2:])
    wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    while True:
        ready, _, _ = select.select([agent, wake_read], [], [])
        if wake_read in ready:
            os.read(wake_read, 4096)
            _reap(agent)
        if agent in ready:
            packet, descriptors, _, _ = socket.recv_fds(agent, _PACKET, _FDS)
            if not packet:
                return 0
            _fork(agent, _decode(packet), descriptors)


def _prepare(models: Sequence[str]) -> None:
    """Import what every rank needs; a model that cannot be read is told by the rank that is asked to serve it."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

    import plexrl.engines.torch.sample
    import plexrl.engines.torch.train
    import plexrl.pool.enginehost  # noqa: F401

    for model in models:
        with contextlib.suppress(OSError, ValueError, KeyError):
            config = AutoConfig.from_pretrained(model, local_files_only=True, trust_remote_code=False)
            MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]


def _reap(agent: socket.socket) -> None:
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            agent.send(_encode(Died(pid, os.waitstatus_to_exitcode(status))))


def _fork(agent: socket.socket, order: Birth, descriptors: list[int]) -> None:
    pid = os.fork()
    if not pid:
        _live(order, descriptors)
    for descriptor in descriptors:
        os.close(descriptor)
    agent.send(_encode(Born(order.number, pid)))


def _live(order: Birth, descriptors: list[int]) -> NoReturn:
    """The child: becomes a rank, never returns."""
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        os.nice(_NICE)
        _nice_session()
        if order.core is not None:
            os.sched_setaffinity(0, {order.core})
        # First above every target, so that none is overwritten before it has moved.
        high = [os.dup2(fd, 100 + i) for i, fd in enumerate(descriptors)]
        os.closerange(3, 100)
        os.dup2(high[0], 1)
        os.dup2(high[0], 2)
        for number, fd in zip(rank_fds(order.fds), high[1:], strict=True):
            os.dup2(fd, number)
        os.closerange(100, 100 + len(high))
        from plexrl.pool.enginehost import serve

        code = serve(order.settings)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _nice_session() -> None:
    """Outside of a cgroup the kernel weighs whole sessions (autogroup), and a rank has one of its own: nice it too.

    An unprivileged process may do so once in 100 ms on the whole machine.
    """
    for _ in range(50):
        try:
            with open("/proc/self/autogroup", "w") as group:
                group.write(str(_NICE))
        except BlockingIOError:
            time.sleep(0.1)
        except OSError:
            return  # a kernel without it
        else:
            return


if __name__ == "__main__":
    sys.exit(main())
