"""How far a group's rollout is: the samples that were outstanding together."""


class Rollout:
    """From the first sample while none is outstanding to the last one's end."""

    def __init__(self) -> None:
        self.asked = self.done = 0

    def add(self) -> None:
        """A sample came."""
        if self.done == self.asked:
            self.asked = self.done = 0
        self.asked += 1

    def end(self) -> None:
        """A sample ended, however."""
        self.done += 1

    @property
    def over(self) -> bool:
        """Whether nothing is left of it."""
        return self.done == self.asked

    def is_tail(self, share: float) -> bool:
        """Whether what is left is the long tail. share: of the rollout that is done by then; 1: it never is."""
        return share < 1 and self.done < self.asked and self.done >= share * self.asked
