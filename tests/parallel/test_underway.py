"""What is under way between backward and a step: who waits for what, and how often."""

from viviane.parallel.underway import Underway


def test_everything_is_waited_for_once_and_readers_as_often_as_asked():
    seen, underway = [], Underway()
    for name in ("a", "b"):
        underway.add(
            lambda name=name: seen.append(f"own {name}"),
            lambda name=name: seen.append(f"sum {name}"),
            lambda name=name: seen.append(f"reads {name}"),
        )
    underway.add(lambda: seen.append("own c"))
    underway.finish(replicas=False)
    assert seen == ["own a", "own b", "own c"]
    underway.wait_for_readers()
    underway.wait_for_readers()
    assert seen[3:] == ["reads a", "reads b"] * 2
    underway.finish(replicas=False)
    underway.finish()
    assert seen[7:] == ["sum a", "sum b"]
    underway.wait_for_readers()  # the sums are there
    underway.finish()
    assert len(seen) == 9


def test_what_is_forgotten_is_not_waited_for():
    underway = Underway()
    underway.add(*[lambda: 1 / 0] * 3)
    underway.clear()
    underway.wait_for_readers()
    underway.finish()
