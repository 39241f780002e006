"""Where things come from: the causes of a task back to its sources, and the makers of a range of blocks."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any
from uuid import UUID, uuid4

import msgspec
import pytest_asyncio

from tests.support.conversation import Conversation, Lease, dag, reactive, source, taken_back
from tests.support.surfaces import Surfaces, open_surfaces
from tracelake.contracts.dispatcher_api import EventIn, OutputIn
from tracelake.contracts.explain import Cause, ExplainedTask, RangeExplanation, TaskExplanation
from tracelake.dispatcher.steps.context import StepContext
from tracelake.dispatcher.steps.upkeep import reconcile_partitions
from tracelake.store import explain

CURSORS = """
INSERT INTO event (org_id, dataset_version, task_id, attempt, kind, range_start, range_end, revision, state)
SELECT gen_random_uuid(), $1, gen_random_uuid(), 1, 'cursor', n, n, 0, 'counted' FROM generate_series(1, 30000) n
"""


class Scene(Conversation):
    def __init__(self, ctx: StepContext, api: Surfaces) -> None:
        super().__init__(ctx)
        self.api = api

    async def explain(self, task_id: UUID, **query: int) -> TaskExplanation:
        answer = await self.api.person.get(f"/v1/tasks/{task_id}/explain", params=query)
        assert answer.status_code == 200, answer.text
        return msgspec.json.decode(answer.content, type=TaskExplanation)

    async def explain_range(self, job: str, start: int, end: int, **query: int) -> RangeExplanation:
        asked = {"from": start, "to": end, **query}
        answer = await self.api.person.get(f"/v1/datasets/{await self.dataset(job)}/explain", params=asked)
        assert answer.status_code == 200, answer.text
        return msgspec.json.decode(answer.content, type=RangeExplanation)

    async def read_all(self, job: str) -> Lease:
        """Run the job's waiting update; it says that its own output reaches as far."""
        lease = await self.lease(job)
        assert isinstance(lease.read.upto, int)
        await self.complete(lease, events=[EventIn(await self.dataset(job), cursor=lease.read.upto)])
        return lease


@pytest_asyncio.fixture
async def scene(ctx: StepContext) -> AsyncIterator[Scene]:
    async with open_surfaces(ctx) as api:
        yield Scene(ctx, api)


def only(task: ExplainedTask) -> Cause:
    [cause] = task.causes
    return cause


def whats(task: ExplainedTask) -> list[str]:
    return [each.what for each in task.handovers]


async def test_a_task_is_followed_to_the_event_of_its_source(scene: Scene) -> None:
    await scene.deploy(dag(source(), reactive("first", "src"), reactive("second", "first")))
    event = (await scene.trigger(0, 9)).event_id
    first = await scene.run("first")
    second = await scene.run("second")
    found = await scene.explain(second.task_id)
    assert [(each.job, each.depth) for each in found.tasks] == [("second", 0), ("first", 1)]
    assert (only(found.tasks[0]).task_id, only(found.tasks[0]).attempt) == (first.task_id, 1)
    root = only(found.tasks[1])
    assert (root.event_id, root.task_id, root.job) == (event, None, "src")
    assert whats(found.tasks[1]) == [
        f"event {event} recorded",
        "task created",
        "attempt 1 claimed by w1",
        "attempt 1 ended: Completed",
    ]
    assert found.tasks[1].handovers[0].seconds is None
    assert all((each.seconds or 0) >= 0 for task in found.tasks for each in task.handovers)
    assert (found.unexplored, found.waiting_for) == ([], None)
    assert found.seconds is not None
    assert found.seconds > 0


async def test_a_retried_attempt_shows_those_before_it(scene: Scene) -> None:
    await scene.deploy(dag(source(), reactive("work", "src")))
    await scene.trigger(0, 9)
    lease = await scene.lease("work", worker="w1")
    await scene.fail(lease)
    await scene.pass_time(3600)
    await scene.complete_scope(await scene.lease(lease.task_id, worker="w2"))
    [task] = (await scene.explain(lease.task_id)).tasks
    assert (task.attempt, task.worker_id, task.outcome, task.because) == (2, "w2", "Completed", "scope")
    assert whats(task)[2:] == [
        "attempt 1 claimed by w1",
        "attempt 1 ended: Failed",
        "attempt 2 claimed by w2",
        "attempt 2 ended: Completed",
    ]
    assert (task.handovers[4].seconds or 0) >= 3600


async def test_a_join_names_the_event_of_each_input(scene: Scene) -> None:
    await scene.deploy(dag(source("a"), source("b"), reactive("join", "a", "b")))
    first = (await scene.trigger(0, 9, job="a")).event_id
    for start in range(10, 100, 10):
        await scene.trigger(start, start + 9, job="a")
    second = (await scene.trigger(0, 9, job="b")).event_id
    lease = await scene.lease("join")
    [task] = (await scene.explain(lease.task_id)).tasks
    assert [(each.job, each.event_id) for each in task.causes] == [("a", first), ("b", second)]


async def test_an_update_is_caused_by_the_event_that_it_read_up_to(scene: Scene) -> None:
    await scene.deploy(
        dag(
            source(kind="always_on", storage="postgres"),
            reactive("up", "src", strategy="PerUpdate", storage="postgres"),
            reactive("next", "up", strategy="PerUpdate"),
        )
    )
    head, uuid = await scene.lease("src"), await scene.dataset("src")
    for cursor in (5, 7):
        await scene.emit(head, EventIn(uuid, cursor=cursor))
    up = await scene.read_all("up")
    await scene.emit(head, EventIn(uuid, cursor=11))
    last = await scene.read_all("next")
    found = await scene.explain(last.task_id)
    assert [each.job for each in found.tasks] == ["next", "up", "src"]
    assert (only(found.tasks[0]).task_id, only(found.tasks[0]).upto) == (up.task_id, 7)
    cause = only(found.tasks[1])
    assert (cause.after, cause.upto, cause.event_kind, cause.event_end) == (-1, 7, "cursor", 7)
    assert (cause.task_id, cause.attempt) == (head.task_id, 1)
    assert (found.tasks[2].because, found.tasks[2].causes) == ("deploy", [])


async def test_work_that_was_taken_back_says_by_what(scene: Scene) -> None:
    await scene.deploy(
        dag(
            source(kind="always_on", storage="postgres"),
            reactive("up", "src", strategy="PerUpdate", storage="postgres"),
        )
    )
    head, uuid = await scene.lease("src"), await scene.dataset("src")
    await scene.emit(head, EventIn(uuid, cursor=99))
    await scene.read_all("up")
    await scene.emit(head, taken_back(uuid, 90, 99, reason="reorg"))
    undo = await scene.lease("up")
    found = await scene.explain(undo.task_id)
    cause = only(found.tasks[0])
    assert cause.taken_back is not None
    assert (cause.taken_back.start, cause.taken_back.end, cause.taken_back.reason) == (90, 99, "reorg")
    assert (cause.event_id, cause.task_id) == (None, head.task_id)
    await scene.emit(head, EventIn(uuid, cursor=104, revision=1))
    told = await scene.explain_range("src", 80, 104)
    assert [(each.start, each.end, each.reason) for each in told.taken_back] == [(90, 99, "reorg")]
    [piece] = told.pieces
    assert (piece.task_id, piece.attempt, piece.commits, piece.end) == (head.task_id, 1, 2, 104)


async def test_a_scope_that_is_made_again_names_the_invalidation(scene: Scene) -> None:
    await scene.deploy(dag(source(), reactive("work", "src", storage="parquet"), reactive("next", "work")))
    await scene.trigger(0, 9)
    old = await scene.run("work")
    head = await scene.run("next")
    await scene.trigger(10, 19)
    work = await scene.lease("work")
    await scene.emit(work, taken_back(await scene.dataset("work"), 0, 9, reason="wrong rows"))
    [again] = await scene.queued("work")
    [task] = (await scene.explain(again)).tasks
    assert task.because == "invalidation"
    assert task.taken_back is not None
    assert (task.taken_back.reason, task.taken_back.task_id) == ("wrong rows", work.task_id)
    after = await scene.explain(head.task_id)
    [known] = [each for each in after.tasks if each.job == "work"]
    assert known.task_id == old.task_id, "what is no longer current is found by its event"


async def test_a_task_that_waits_says_for_what(scene: Scene) -> None:
    await scene.deploy(dag(source(), reactive("work", "src")))
    await scene.trigger(0, 9)
    found = await scene.explain(await scene.only_queued("work"))
    assert found.waiting_for is not None
    assert found.waiting_for.reason == "Worker"
    assert (found.tasks[0].attempt, found.tasks[0].worker_id) == (0, None)


async def test_a_reconciled_task_is_followed_to_the_event_it_had_missed(scene: Scene) -> None:
    await scene.deploy(dag(source()))
    event = (await scene.trigger(0, 9)).event_id
    await scene.deploy(dag(source(), reactive("late", "src")))
    await reconcile_partitions(scene.ctx)
    [task] = (await scene.explain(await scene.only_queued("late"))).tasks
    assert (task.because, only(task).event_id) == ("reconcile", event)


async def test_a_long_chain_is_cut_and_says_where(scene: Scene) -> None:
    jobs = [reactive("j0", "src"), *(reactive(f"j{n}", f"j{n - 1}") for n in range(1, 5))]
    await scene.deploy(dag(source(), *jobs))
    await scene.trigger(0, 9)
    leases = [await scene.run(f"j{n}") for n in range(5)]
    found = await scene.explain(leases[4].task_id, depth=3)
    assert [each.job for each in found.tasks] == ["j4", "j3", "j2"]
    assert found.unexplored == [leases[1].task_id]


async def test_unknown_things_and_bad_numbers_are_refused(scene: Scene) -> None:
    await scene.deploy(dag(source()))
    name = await scene.dataset("src")
    statuses = [
        (await scene.api.person.get(path)).status_code
        for path in (
            f"/v1/tasks/{uuid4()}/explain",
            f"/v1/tasks/{uuid4()}/explain?depth=0",
            "/v1/tasks/x/explain",
            "/v1/datasets/nothing/explain",
            f"/v1/datasets/{name}/explain?from=9&to=1",
            f"/v1/datasets/{name}/explain?from=-1",
        )
    ]
    assert statuses == [404, 422, 422, 404, 422, 422]
    assert (await scene.api.user.get(f"/v1/tasks/{uuid4()}/explain")).status_code == 401
    nothing = await scene.api.person.get(f"/v1/datasets/{name}/explain")
    assert (nothing.status_code, nothing.json()["pieces"], nothing.json()["start"]) == (200, [], None)


async def test_a_range_names_its_partitions_their_attempts_and_what_is_missing(scene: Scene) -> None:
    await scene.deploy(dag(source(), reactive("work", "src", storage="parquet")))
    await scene.trigger(0, 9)
    lease = await scene.lease("work", worker="w1")
    await scene.fail(lease)
    await scene.pass_time(3600)
    await scene.complete_scope(await scene.lease(lease.task_id, worker="w2"))
    await scene.trigger(20, 29)
    other = await scene.run("work")
    told = await scene.explain_range("work", 5, 34)
    assert [(each.kind, each.start, each.end) for each in told.pieces] == [
        ("partition", 0, 9),
        ("partition", 20, 29),
    ]
    first, second = told.pieces
    assert (first.task_id, first.attempt, first.worker_id) == (lease.task_id, 2, "w2")
    [earlier] = first.earlier_attempts
    assert (earlier.worker_id, earlier.outcome, earlier.error_message) == ("w1", "Failed", "it broke")
    assert (second.task_id, second.earlier_attempts) == (other.task_id, [])
    assert [(gap.start, gap.end) for gap in told.gaps] == [(10, 19), (30, 34)]
    assert (told.job, told.operator, [each.job for each in told.inputs]) == ("work", "noop", ["src"])
    page = await scene.explain_range("work", 0, 34, limit=1)
    assert ([each.start for each in page.pieces], page.next) == ([0], 20)


async def test_what_a_manifest_says_is_told(scene: Scene) -> None:
    await scene.deploy(dag(source(), reactive("work", "src", storage="parquet")))
    await scene.trigger(0, 9)
    await scene.run("work")
    said = {
        "files": [{"location": "file:///x", "bytes": 10}, {"location": "file:///y", "bytes": 5}],
        "schema_hash": "sha256:00",
        "verified": "full",
        "endpoints": ["alpha", "beta"],
    }
    await scene.query("UPDATE partition SET manifest = $1 WHERE stored RETURNING 1", said)
    [piece] = (await scene.explain_range("work", 0, 9)).pieces
    assert (piece.files, piece.bytes, piece.verified) == (2, 15, "full")
    assert (piece.endpoints, piece.schema_hash) == (["alpha", "beta"], "sha256:00")


async def test_commits_of_a_source_are_told_by_attempt(scene: Scene) -> None:
    await scene.deploy(dag(source(kind="always_on", storage="postgres")))
    uuid = await scene.dataset("src")
    head = await scene.lease("src", worker="w1")
    for cursor in (49, 50, 51):
        await scene.emit(head, EventIn(uuid, cursor=cursor))
    await scene.fail(head)
    await scene.pass_time(3600)
    again = await scene.lease(head.task_id, worker="w2")
    for cursor in (60, 61):
        await scene.emit(again, EventIn(uuid, cursor=cursor))
    told = await scene.explain_range("src", 20, 55)
    pieces = [(each.start, each.end, each.attempt, each.worker_id, each.commits) for each in told.pieces]
    assert pieces == [(20, 51, 1, "w1", 3), (52, 60, 2, "w2", 1)]
    assert (told.searched, told.gaps) == (True, [])


async def test_commits_of_updates_are_told_by_task(scene: Scene) -> None:
    await scene.deploy(
        dag(
            source(kind="always_on", storage="postgres"),
            reactive("up", "src", strategy="PerUpdate", storage="postgres"),
        )
    )
    head, uuid = await scene.lease("src"), await scene.dataset("src")
    leases = []
    for cursor in (10, 20, 30):
        await scene.emit(head, EventIn(uuid, cursor=cursor))
        leases.append(await scene.read_all("up"))
    told = await scene.explain_range("up", 12, 25)
    assert [(each.task_id, each.start, each.end) for each in told.pieces] == [
        (leases[1].task_id, 12, 20),
        (leases[2].task_id, 21, 30),
    ]


async def test_the_event_of_a_moment_is_found_without_reading_those_after_it(scene: Scene) -> None:
    await scene.deploy(
        dag(
            source(kind="always_on", storage="postgres"),
            reactive("up", "src", strategy="PerUpdate", storage="postgres"),
        )
    )
    head, uuid = await scene.lease("src"), await scene.dataset("src")
    await scene.emit(head, EventIn(uuid, cursor=5))
    up = await scene.read_all("up")
    await scene.pass_time(60)
    output = await scene.output("src")
    await scene.query(CURSORS, output["dataset_version"])
    await scene.query("ANALYZE event")
    found = await scene.explain(up.task_id)
    assert (only(found.tasks[0]).task_id, only(found.tasks[0]).event_end) == (head.task_id, 5)
    claimed = (await scene.attempts(up.task_id))[0]["claimed_at"]
    arguments: list[Any] = [output["dataset_version"], claimed, None, 5, explain.MAX_EVENTS]
    rows = await scene.query(
        "EXPLAIN (ANALYZE, FORMAT JSON, TIMING OFF) " + explain.SQL.event_before, *arguments
    )
    assert events_read(rows[0][0]) < 100, rows[0][0]


def events_read(plan: Any) -> int:
    def nodes(node: dict[str, Any]) -> list[dict[str, Any]]:
        return [node, *(found for child in node.get("Plans", []) for found in nodes(child))]

    parsed = plan if isinstance(plan, list) else msgspec.json.decode(plan)
    return sum(
        (node["Actual Rows"] + node.get("Rows Removed by Filter", 0)) * node["Actual Loops"]
        for node in nodes(parsed[0]["Plan"])
        if node.get("Relation Name") == "event"
    )


async def test_an_output_reported_by_hand_is_a_piece_of_its_own(scene: Scene) -> None:
    await scene.deploy(dag(source(), reactive("work", "src", storage="postgres", update_strategy="replace")))
    await scene.trigger(0, 9)
    lease = await scene.lease("work")
    await scene.complete(lease, OutputIn(0, start=0, end=9, row_count=7))
    [piece] = (await scene.explain_range("work", 0, 9)).pieces
    assert (piece.row_count, piece.files, piece.verified) == (7, None, None)


async def test_the_task_of_a_source_names_the_request_that_it_is_for(scene: Scene) -> None:
    await scene.deploy(dag(source("code", operator="own", runtime="ecs_python")))
    await scene.trigger(3, 9, job="code")
    lease = await scene.lease("code")
    [task] = (await scene.explain(lease.task_id)).tasks
    assert task.requested == {"kind": "manual", "number": 1, "start": 3, "end": 9}
