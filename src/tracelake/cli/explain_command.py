"""``tracelake explain``: why a task ran, and who made a range of blocks."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated

import typer

from tracelake.cli.dataset_names import resolve
from tracelake.cli.show import print_json
from tracelake.cli.stack import HomeOption, JsonOption, TokenOption, UrlOption, connect
from tracelake.cli.task_ids import find_task, may_be_task, whole_id
from tracelake.domain.block_range import MAX_BLOCK
from tracelake.domain.errors import NotFound

if TYPE_CHECKING:
    from tracelake.client import Client
    from tracelake.contracts.explain import RangeExplanation, TaskExplanation

_RANGED = re.compile(r"(?P<name>[^:]+):(?P<start>[0-9]{1,19})-(?P<end>[0-9]{1,19})")


def explain(
    what: Annotated[
        str,
        typer.Argument(
            metavar="TASK|DATASET[:FROM-TO]",
            help="A task's id or its beginning; or a dataset, by its published name, uuid, or DAG/JOB[/OUTPUT].",
        ),
    ],
    start: Annotated[
        int | None,
        typer.Option(
            "--from", min=0, max=MAX_BLOCK, help="A dataset's first block.  [default: the first committed]"
        ),
    ] = None,
    end: Annotated[
        int | None,
        typer.Option(
            "--to", min=0, max=MAX_BLOCK, help="Its last block, inclusive.  [default: the last committed]"
        ),
    ] = None,
    depth: Annotated[int, typer.Option(min=1, max=50, help="How many tasks back to go.")] = 20,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="At most so many pieces of a dataset.")] = 100,
    url: UrlOption = None,
    token: TokenOption = None,
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Explain where a task or a range of blocks comes from.

    Of a task: the event that caused it, the attempt that said it, what caused that, and so on back to the source,
    with the time of each hand-over and how long it took since the one before.

    Of a dataset's blocks: the tasks and attempts that wrote them, the endpoints that delivered them, what was
    checked, what was taken back, and what is missing.

    Examples:

        tracelake explain 0190b6c1

        tracelake explain blocks --from 1000 --to 1999

        tracelake explain chain/ingest/logs:1000-1999 --json
    """
    if (ranged := _RANGED.fullmatch(what)) is not None:
        if start is not None or end is not None:
            raise typer.BadParameter("give the blocks as DATASET:FROM-TO or by --from and --to, not both")
        what, start, end = ranged["name"], int(ranged["start"]), int(ranged["end"])
    with connect(url, token, home) as client:
        found = _look(client, what, start, end, depth, limit)
    if as_json:
        print_json(found)
    else:
        from tracelake.cli.explain_report import print_explanation

        print_explanation(found)


def _look(
    client: Client, what: str, start: int | None, end: int | None, depth: int, limit: int
) -> TaskExplanation | RangeExplanation:
    """A uuid may be a task's or a dataset's; with blocks it is a dataset's. The beginning of a task's id may be the
    name of a dataset too, and then it is the dataset's."""
    of_task = start is None and end is None
    if of_task and (task_id := whole_id(what)) is not None:
        try:
            return client.explain_task(task_id, depth=depth)
        except NotFound as unknown:
            try:
                return client.explain_range(what, limit=limit)
            except NotFound:
                raise NotFound("UnknownTask", f"there is no task and no dataset {what}") from unknown
    try:
        return client.explain_range(resolve(client, what), start=start, end=end, limit=limit)
    except NotFound as unknown:
        if not of_task:
            raise
        if not may_be_task(what):
            raise NotFound(
                unknown.reason, f"{unknown.message}; ids of tasks are in `tracelake tasks`"
            ) from None
    return client.explain_task(find_task(client, what), depth=depth)
