"""Which invoker is asked next: by load, not at a closed door, and not again at once when it was away."""

from __future__ import annotations

from tracelake.dispatcher.loops.invoke_functions import InvokerCall, Invokers, KnownInvoker
from tracelake.store.functions import InvokerRow


def known(*rows: tuple[str, int]) -> Invokers:
    made = Invokers()
    made.see([InvokerRow(url, concurrency) for url, concurrency in rows])
    return made


def chosen(invokers: Invokers, now: float = 0.0) -> KnownInvoker:
    found = invokers.choose(now)
    assert found is not None
    return found


def test_an_invoker_gets_as_many_calls_at_a_time_as_it_has_slots() -> None:
    invokers = known(("a", 2))
    turns = [InvokerCall(chosen(invokers)), InvokerCall(chosen(invokers))]
    assert invokers.choose(0.0) is None
    assert invokers.why_none(0.0) is None
    turns[0].end()
    assert chosen(invokers).url == "a"


def test_calls_are_spread_by_free_slots_and_in_turns() -> None:
    invokers = known(("a", 1), ("b", 3))
    urls = []
    for now in range(4):
        invoker = chosen(invokers, float(now))
        InvokerCall(invoker)
        urls.append(invoker.url)
    assert urls == ["a", "b", "b", "b"]
    alone = known(("a", 5), ("b", 5))
    assert [chosen(alone, float(now)).url for now in range(1, 5)] == ["a", "b", "a", "b"]


def test_at_a_closed_door_only_one_waits() -> None:
    invokers = known(("a", 8), ("b", 1))
    a = chosen(invokers)
    turn = InvokerCall(a)
    a.had_no_slot()
    assert chosen(invokers).url == "b"
    InvokerCall(chosen(invokers))
    assert invokers.choose(0.0) is None
    turn.end()
    assert chosen(invokers).url == "a", "somebody has to find out"
    a.answered()
    InvokerCall(a)
    assert chosen(invokers).url == "a"


def test_an_invoker_that_is_away_is_left_alone_longer_each_time() -> None:
    invokers = known(("a", 4))
    a = chosen(invokers)
    a.is_away(0.0, "nobody listens")
    assert invokers.choose(0.9) is None
    assert invokers.why_none(0.9) == "nobody listens"
    assert chosen(invokers, 1.0) is a
    a.is_away(1.0, "nobody listens")
    assert invokers.choose(2.9) is None
    assert chosen(invokers, 3.0) is a
    for _ in range(20):
        a.is_away(3.0, "still")
    assert chosen(invokers, 18.0) is a
    InvokerCall(a)
    assert invokers.choose(18.0) is None, "a single call until it has answered"


def test_who_is_known_stays_known_and_who_left_is_not_asked() -> None:
    invokers = known(("a", 1))
    chosen(invokers).is_away(0.0, "gone")
    invokers.see([InvokerRow("a", 2), InvokerRow("b", 1)])
    assert chosen(invokers).url == "b"
    invokers.see([])
    assert invokers.choose(0.0) is None
    assert "no invoker" in (invokers.why_none(0.0) or "")


def test_a_lease_moves_to_somebody_who_may_have_a_slot() -> None:
    invokers = known(("a", 1), ("b", 1))
    turn = InvokerCall(chosen(invokers))
    a = turn.invoker
    a.had_no_slot()
    b = invokers.choose_other(a, 0.0)
    assert b is not None
    turn.move(b)
    assert (a.in_hand, b.in_hand) == (0, 1)
    b.had_no_slot()
    assert invokers.choose_other(b, 0.0) is None, "that door is closed too"
