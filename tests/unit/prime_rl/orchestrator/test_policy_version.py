"""The live policy version and its observers."""

from __future__ import annotations

from prime_rl.orchestrator.policy_version import PolicyVersion


def test_observers_see_both_numbers_in_order() -> None:
    version, calls = PolicyVersion(3), list[tuple[str, int, int]]()
    assert (version.live, version.released) == (3, 3)
    for name in "ab":
        version.subscribe(lambda version, name=name: calls.append((name, version.live, version.released)))
    version.update(live=4, released=4)
    version.update(live=4, released=6)  # the trainer reads no batches
    assert calls == [("a", 4, 4), ("b", 4, 4), ("a", 4, 6), ("b", 4, 6)]
