"""The names in a query become dataset versions: what the caller may read, and nothing else exists.

A task reads the datasets of its token in the versions that stand there, also when they are no longer current, under
their names and as ``input_0``, ``input_1`` and so on. A user reads what is published, in its current version. Names
are resolved once: the whole query reads the version that was found.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import assert_never
from uuid import UUID

from tracelake.domain.errors import Conflict, NotFound
from tracelake.domain.task import check_lives
from tracelake.query.caller import Caller, TaskCaller, UserCaller
from tracelake.query.catalog import Catalog, TaskNow, Wanted
from tracelake.query.relation import ResolvedRelation, WantedBlocks

_SHOWN_NAMES = 20


async def resolve(
    catalog: Catalog, caller: Caller, wanted: Mapping[str, WantedBlocks], *, max_files: int
) -> dict[str, ResolvedRelation]:
    """By the names that were asked for, which are in lower case as all names of datasets are. An attempt that is
    over is refused whatever it asks for, nothing included."""
    known: Sequence[str]
    match caller:
        case TaskCaller():
            own = names_of_task(caller)
            asked = [Wanted(name, own[name], blocks) for name, blocks in wanted.items() if name in own]
            look = await catalog.look(caller.org_id, caller.task_id, asked, max_files=max_files)
            check_attempt(look.task, caller)
            known = list(own)
        case UserCaller():
            asked = [Wanted(name, None, blocks) for name, blocks in wanted.items()]
            look = await catalog.look(caller.org_id, None, asked, max_files=max_files)
            known = [] if len(look.relations) == len(wanted) else await catalog.names(caller.org_id)
        case _:
            assert_never(caller)
    found = {relation.name: relation for relation in look.relations}
    if missing := [name for name in wanted if name not in found]:
        raise _unknown(missing, known)
    return {name: found[name] for name in wanted}


def names_of_task(caller: TaskCaller) -> dict[str, UUID]:
    """What an attempt can name, and the version behind it. A name that would mean two things, because a dataset is
    called like another one's place (``input_1``), means neither: somebody else may have chosen it."""
    places = {f"input_{place}": dataset.dataset_version for place, dataset in enumerate(caller.datasets)}
    named = {
        dataset.name: dataset.dataset_version
        for dataset in reversed(caller.datasets)
        if dataset.name is not None
    }
    doubtful = {name for name in places if named.get(name, places[name]) != places[name]}
    return {name: version for name, version in {**places, **named}.items() if name not in doubtful}


def check_attempt(task: TaskNow | None, caller: TaskCaller) -> None:
    """The rule of every other call of an attempt: the current one, until a newer one is claimed or it has ended."""
    if task is None:
        raise Conflict("StaleAttempt", "the token's task isn't there")
    if task.attempt != caller.attempt:
        raise Conflict("StaleAttempt", f"attempt {caller.attempt} is not the current one ({task.attempt})")
    check_lives(task.attempt, task.status, task.last_outcome)


def _unknown(missing: Sequence[str], known: Sequence[str]) -> NotFound:
    likely = difflib.get_close_matches(missing[0], known, _SHOWN_NAMES, 0.4)
    shown = [*likely, *[name for name in known if name not in likely]][:_SHOWN_NAMES]
    more = f" and {len(known) - len(shown)} more" if len(known) > len(shown) else ""
    there = f"there are {', '.join(shown)}{more}" if shown else "there are none that you can read"
    return NotFound("UnknownRelation", f"no dataset {', '.join(repr(name) for name in missing)}: {there}")
