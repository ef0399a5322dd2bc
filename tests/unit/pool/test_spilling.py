"""Who leaves a node's memory first."""

from plexrl.pool.spilling import Candidate, coldest


def candidate(name: str, node: str = "n", size: int = 10, waiting: bool = False, next_use: int = 0, used: int = 0):
    return Candidate(deployment=name, nodes={node: size}, waiting=waiting, next_use_us=next_use, used_us=used)


def test_only_who_is_on_the_node():
    assert coldest([], "n") is None
    assert coldest([candidate("a", "m"), candidate("b", size=0)], "n") is None
    assert coldest([candidate("a", "m"), candidate("b")], "n") == "b"


def test_nobody_who_waits_before_all_others():
    later = candidate("later", waiting=True, next_use=10**9)
    assert coldest([later, candidate("soon", next_use=1)], "n") == "soon"
    assert coldest([later], "n") == "later"


def test_the_furthest_next_use_then_the_longest_unused_then_the_largest():
    near, far = candidate("near", next_use=5, used=0), candidate("far", next_use=9, used=8)
    assert coldest([near, far], "n") == "far"
    old, new = candidate("old", used=1), candidate("new", used=2)
    assert coldest([new, old], "n") == "old"
    small, large = candidate("small", size=1), candidate("large", size=2)
    assert coldest([small, large], "n") == "large"
    assert coldest([candidate("b"), candidate("a")], "n") == "a"
