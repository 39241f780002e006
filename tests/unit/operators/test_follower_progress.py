"""The progress of a follower is true at every moment: a head that is seen isn't followed while a problem lasts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

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
