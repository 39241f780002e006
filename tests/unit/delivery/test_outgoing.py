"""Messages at hand: order by key, and none that is forgotten or sent twice."""

from __future__ import annotations

from datetime import UTC, datetime

from hypothesis import given
from hypothesis import strategies as st

from tracelake.contracts.deliveries import DeliveryMessage
from tracelake.delivery.outgoing import Outgoing


def message(number: int, key: str = "k", wait: float = 0.0, record: str = "") -> DeliveryMessage:
    now = datetime(2026, 1, 1, tzinfo=UTC)
    return DeliveryMessage(number, record or f"r{number}", 1, 1, "row", key, "{}", None, now, 0, wait)


def ids(messages: list[DeliveryMessage]) -> list[int]:
    return [each.message_id for each in messages]


def test_messages_of_one_key_go_one_after_the_other_and_others_beside_them() -> None:
    out = Outgoing()
    out.add([message(1), message(2), message(3, "other")], 0)
    assert ids(out.take(9, 0)) == [1, 3]
    assert out.take(9, 0) == []
    out.again(1, 5.0)
    assert out.take(9, 4.9) == []
    assert ids(out.take(9, 5.0)) == [1]
    out.done(1)
    assert ids(out.take(9, 5.0)) == [2]


def test_when_it_hurries_each_key_goes_on_at_once_in_its_order() -> None:
    out = Outgoing()
    out.add([message(1), message(2), message(3, "other", wait=9.0), message(4, "third")], 0)
    assert ids(out.take(9, 0)) == [1, 4]
    out.again(1, 50.0)
    assert out.take(9, 1.0) == []
    out.hurry(1.0)
    # What is under way stays so.
    assert sorted(ids(out.take(9, 1.0))) == [1, 3]
    out.again(4, 60.0)
    assert out.take(9, 2.0) == []


def test_an_older_message_that_comes_back_goes_before_those_that_wait() -> None:
    out = Outgoing()
    out.add([message(5), message(6)], 0)
    assert ids(out.take(9, 0)) == [5]
    out.add([message(2)], 0)
    assert out.take(9, 0) == []
    out.done(5)
    assert ids(out.take(9, 0)) == [2]


def test_a_dropped_message_frees_its_key_and_one_under_way_is_kept() -> None:
    out = Outgoing()
    out.add([message(1), message(2)], 0)
    assert ids(out.take(9, 0)) == [1]
    out.drop([1, 2])
    assert (len(out), out.under_way) == (1, 1)
    out.done(1)
    assert (len(out), out.under_way) == (0, 0)


def test_revisions_of_a_record_go_one_after_the_other_also_when_their_keys_differ() -> None:
    out = Outgoing()
    out.add([message(1, "low", record="r"), message(2, "high", record="r"), message(3, "high")], 0)
    assert ids(out.take(9, 0)) == [1]
    out.again(1, 5.0)
    assert out.take(9, 4) == []
    assert ids(out.take(9, 5)) == [1]
    out.done(1)
    assert ids(out.take(9, 5)) == [2]
    out.done(2)
    assert ids(out.take(9, 5)) == [3]


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.sampled_from("abc"), st.sampled_from(["", "x", "y"])), max_size=60
    )
)
def test_every_message_is_tried_in_the_order_of_its_key_and_of_its_record(
    steps: list[tuple[int, str, str]],
) -> None:
    out, now, number = Outgoing(), 0.0, 0
    flying: list[DeliveryMessage] = []
    finished: dict[str, list[int]] = {}
    records: dict[str, list[int]] = {}
    for action, key, record in steps:
        now += 1
        if action == 0:
            number += 1
            out.add([message(number, key, record=record)], now)
        elif action == 1:
            flying += out.take(2, now)
        elif flying and action == 2:
            out.again(flying.pop(0).message_id, now + 3)
        elif flying:
            done = flying.pop(0)
            out.done(done.message_id)
            finished.setdefault(done.order_key, []).append(done.message_id)
            records.setdefault(done.record_id, []).append(done.message_id)
        assert len({each.order_key for each in flying}) == len(flying) == out.under_way
        assert len({each.record_id for each in flying}) == len(flying)
    while len(out):
        now += 10
        flying += out.take(99, now)
        for each in flying:
            out.done(each.message_id)
            finished.setdefault(each.order_key, []).append(each.message_id)
            records.setdefault(each.record_id, []).append(each.message_id)
        flying.clear()
    assert sorted(each for line in finished.values() for each in line) == list(range(1, number + 1))
    assert all(line == sorted(line) for line in (*finished.values(), *records.values()))
