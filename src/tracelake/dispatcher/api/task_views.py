"""The user surface: tasks, and what a person may do about one."""

from __future__ import annotations

from tracelake.contracts.user_api import TaskChanged, TaskDetail, TaskPage, TaskQuery
from tracelake.dispatcher.api.read import read
from tracelake.dispatcher.api.request import ApiRequest
from tracelake.dispatcher.steps.cancel_task import cancel_task
from tracelake.dispatcher.steps.retry_task import retry_task
from tracelake.serving.answer import Answer, json_answer
from tracelake.serving.endpoint import Operation, endpoint
from tracelake.serving.identity import Identity
from tracelake.store import reads

CHANGING = Operation(identity=Identity.USER, answers={200: TaskChanged}, refusals=(409,))


@endpoint("GET", "/v1/tasks", Operation(identity=Identity.USER, query=TaskQuery, answers={200: TaskPage}))
async def list_tasks(request: ApiRequest) -> Answer:
    """Tasks, newest first."""
    return json_answer(await read(request, reads.tasks, request.query_as(TaskQuery)))


@endpoint("GET", "/v1/tasks/{task_id:str}", Operation(identity=Identity.USER, answers={200: TaskDetail}))
async def show_task(request: ApiRequest) -> Answer:
    """One task with its attempts, inputs, outputs and events, and why it waits if it does."""
    return json_answer(await read(request, reads.task, request.path_uuid("task_id")))


@endpoint("POST", "/v1/tasks/{task_id:str}/cancel", CHANGING)
async def cancel(request: ApiRequest) -> Answer:
    """Cancel a task at once; a running attempt hears of it by its next heartbeat."""
    task_id = request.path_uuid("task_id")
    await request.refuse_body()
    await cancel_task(request.services.ctx, task_id, request.user.name)
    return json_answer(TaskChanged(task_id, "Canceled"))


@endpoint("POST", "/v1/tasks/{task_id:str}/retry", CHANGING)
async def retry(request: ApiRequest) -> Answer:
    """Queue a task again at once, also when no attempts are left."""
    task_id = request.path_uuid("task_id")
    await request.refuse_body()
    await retry_task(request.services.ctx, task_id, request.user.name)
    return json_answer(TaskChanged(task_id, "Queued"))


TASK_VIEWS = (list_tasks, show_task, cancel, retry)
