"""Who is next: the line of gangs that wait for their GPUs."""

from bisect import bisect_left, insort
from collections.abc import Iterator


class Fifo:
    """Gangs by ticket: the number of their oldest eligible call, or of their last turn's end if that is later.

    The second half makes a preempted gang go to the back although its calls are old.
    """

    def __init__(self) -> None:
        self._line: list[tuple[int, str]] = []
        self._tickets: dict[str, int] = {}

    def put(self, gang: str, ticket: int) -> None:
        """Let the gang wait with this ticket, in place of the one that it had."""
        self.discard(gang)
        self._tickets[gang] = ticket
        insort(self._line, (ticket, gang))

    def discard(self, gang: str) -> None:
        """The gang waits no longer."""
        ticket = self._tickets.pop(gang, None)
        if ticket is not None:
            del self._line[bisect_left(self._line, (ticket, gang))]

    def ticket(self, gang: str) -> int | None:
        """The gang's ticket; None when it does not wait."""
        return self._tickets.get(gang)

    def __iter__(self) -> Iterator[str]:
        """The gangs that wait, the next one first."""
        return (gang for _, gang in self._line)

    def __len__(self) -> int:
        return len(self._line)


ORDERS = {"fifo": Fifo}
