"""Ranks of a gang find each other, and know whether each has a card of its own."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from plexrl.engines.torch.gang import Gang


@pytest.mark.parametrize(("names", "apart"), [(("0@a", "0@b"), True), (("0@a", "0@a"), False)])
def test_cards_are_told_apart_and_sums_are_equal(tmp_path, names, apart):
    def rank(number: int) -> tuple[bool, torch.Tensor]:
        gang = Gang(number, 2, str(tmp_path / "meet"), "127.0.0.1")
        # On a CPU sums stay with gloo, whatever the cards.
        gang.use(torch.device("cpu"))
        found = gang.apart(names[number])
        mine = torch.full((3,), float(number + 1))
        gang.sum(mine)
        gang.close()
        return found, mine

    with ThreadPoolExecutor(2) as threads:
        for found, total in threads.map(rank, range(2)):
            assert found is apart and total.tolist() == [3.0, 3.0, 3.0]
