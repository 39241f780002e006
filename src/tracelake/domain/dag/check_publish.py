"""What is wrong with ``publish``, given the jobs and the names that other DAGs hold."""

from __future__ import annotations

import re
from collections.abc import Sequence

from tracelake.domain.buffer_schema import BufferSchema, schema_problems
from tracelake.domain.dag.check_graph import output_problem
from tracelake.domain.dag.installation import Installation
from tracelake.domain.dag.job_fields import JobDraft
from tracelake.domain.dag.model import JobOutput, PublishedOutput
from tracelake.domain.dag.problems import Problems
from tracelake.domain.dag.publish_fields import PublishDraft

_PLACE = re.compile(r"input_[0-9]+|scope_blocks")


def check_publish(
    dag: str,
    drafts: Sequence[JobDraft],
    publish: Sequence[PublishDraft],
    installation: Installation,
    problems: Problems,
) -> None:
    by_name = {draft.spec.name: draft for draft in reversed(drafts)}
    taken: dict[tuple[str, int], str] = {}
    for draft in publish:
        entry = draft.entry
        owner = installation.published_elsewhere.get(entry.name, dag)
        if owner != dag:
            problems.add_unless_known(draft.path, f"{entry.name} is already published by DAG {owner}")
        if _PLACE.fullmatch(entry.name):
            problems.add_unless_known(
                draft.path,
                f"{entry.name} is a name that SQL of a task has already, for its inputs by their place or for its "
                "scope: choose another",
            )
        if not isinstance(entry, PublishedOutput):
            for path, message in schema_problems(BufferSchema.of(entry)):
                problems.add_unless_known((*draft.path, "schema", *path), message)
            continue
        if wrong := output_problem(JobOutput(entry.job, entry.output), by_name, problems):
            field, message = wrong
            problems.add_unless_known((*draft.path, "from", field), message)
            continue
        other = taken.setdefault((entry.job, entry.output), entry.name)
        if other != entry.name:
            problems.add_unless_known(
                (*draft.path, "from"), f"output {entry.output} of {entry.job} is already published as {other}"
            )
