"""The progress of a follower is true at every moment: a head that is seen isn't followed while a problem lasts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from tracelake.contracts.dispatcher_api import MAX_PROGRESS_BYTES
from tracelake.evm.rpc.endpoint import EndpointStats
from tracelake.operators.block_follower.progress import FollowerProgress
from tracelake.operators.context import Context


class Shown(SimpleNamespace):
    """The part of a context that progress is shown through."""

    def __init__(self) -> None:
        silent = SimpleNamespace(info=lambda *_, **__: None, warning=lambda *_, **__: None)
        super().__init__(fields={}, log=silent)

    def progress(self, **fields: Any) -> None:
        self.fields |= fields


@pytest.mark.parametrize(("head", "usual"), [(6, "following the tip"), (500, "catching up")])
def test_a_problem_that_lasts_is_shown_however_often_the_head_is_seen(head: int, usual: str) -> None:
    shown = Shown()
    progress = FollowerProgress(cast(Context, shown))
    progress.saw_head(head, 5, None, 0)
    assert shown.fields["message"] == usual
    progress.trouble("no endpoint has a correct block")
    progress.saw_head(head + 1, 5, None, 0)
    assert shown.fields["message"] == "waiting: temporary problem"
    assert shown.fields["problem"] == "no endpoint has a correct block"
    progress.recovered()
    progress.saw_head(head + 1, 5, None, 0)
    assert (shown.fields["message"], shown.fields["problem"]) == (usual, None)


def stats(state: str, problem: str | None) -> EndpointStats:
    counts = dict.fromkeys(("requests", "calls", "bytes", "failures", "rate_limited", "mismatches"), 0)
    return EndpointStats(
        name="node",
        state=state,
        chain_id=1,
        head=6,
        latency=0.1,
        batch=1,
        missing_methods=(),
        last_problem=problem,
        **counts,
    )


def test_times_and_endpoints_go_with_the_head_but_change_rarely() -> None:
    shown, now = Shown(), [1000.0]
    progress = FollowerProgress(cast(Context, shown), wall=lambda: now[0], health=lambda: [stats("ok", None)])
    progress.saw_head(6, 4, None, 0, head_time=990, tip_time=966.0)
    expected = {"head_at": 1000, "head_time": 990, "lag_seconds": 24.0, "endpoint_states": "node ok"}
    assert expected.items() <= shown.fields.items()
    now[0] += 1
    assert not progress.is_due()
    progress.saw_head(6, 4, None, 0, head_time=990)
    assert expected.items() <= shown.fields.items(), "nothing to write"
    now[0] += 5
    assert progress.is_due()
    progress.saw_head(6, 6, None, 0, head_time=990)
    assert (shown.fields["head_at"], shown.fields["lag_seconds"]) == (1006, 0.0)


def test_a_problem_keeps_its_beginning_and_says_whose_it_is() -> None:
    shown, now = Shown(), [1000.0]
    bad = stats("suspect", "\u2603" * 10_000)
    progress = FollowerProgress(cast(Context, shown), wall=lambda: now[0], health=lambda: [bad] * 16)
    progress.trouble("node: refused", of_chain=True)
    now[0] += 60
    progress.trouble("node: timed out", of_chain=True)
    assert (shown.fields["problem"], shown.fields["problem_since"]) == ("node: timed out", 1000)
    assert shown.fields["problem_of"] == "chain"
    assert len(msgspec.json.encode(shown.fields)) < MAX_PROGRESS_BYTES
    progress.recovered()
    assert (shown.fields["problem"], shown.fields["problem_since"]) == (None, None)
    progress.trouble("no data database")
    assert (shown.fields["problem_since"], shown.fields["problem_of"]) == (1060, "platform")
