"""A deploy plan for people."""

from __future__ import annotations

from collections.abc import Iterator

from tracelake.domain.dag.plan import ChangeKind, DeployPlan, JobChange, PublishChange, PublishKind

_SIGNS = {
    ChangeKind.ADDED: "+",
    ChangeKind.REPLACED: "!",
    ChangeKind.RETUNED: "~",
    ChangeKind.UNCHANGED: " ",
    ChangeKind.REMOVED: "-",
}
_PUBLISH_SIGNS = {
    PublishKind.PUBLISHED: "+",
    PublishKind.MOVED: "!",
    PublishKind.EXTENDED: "~",
    PublishKind.UNPUBLISHED: "-",
    PublishKind.UNCHANGED: " ",
}


def render(plan: DeployPlan) -> str:
    return "\n".join(_lines(plan)) + "\n"


def _lines(plan: DeployPlan) -> Iterator[str]:
    if plan.changes_nothing:
        yield f"DAG {plan.dag}: nothing changes"
        return
    yield f"DAG {plan.dag}"
    dag = plan.dag
    for change in sorted(plan.jobs, key=lambda job: (job.dag != plan.dag, job.dag)):
        if change.dag != dag:
            dag = change.dag
            yield f"DAG {dag} (downstream)"
        yield from _job_lines(change)
    if plan.publish:
        yield "Published names"
        for entry in plan.publish:
            yield _publish_line(entry)
            yield from (f"      {reason}" for reason in entry.because)


def _job_lines(change: JobChange) -> Iterator[str]:
    yield f"  {_SIGNS[change.kind]} {change.job}: {change.kind}"
    yield from (f"      because {reason}" for reason in change.because)
    if change.kind in (ChangeKind.UNCHANGED, ChangeKind.RETUNED):
        return
    for output in change.outputs:
        known_as = f" ({output.dataset})" if output.dataset else ""
        yield f"      output {output.index} {output.name}{known_as}: {output.version} version"


def _publish_line(change: PublishChange) -> str:
    means = {
        PublishKind.MOVED: f": {change.before} -> {change.after}",
        PublishKind.PUBLISHED: f": {change.after}",
    }.get(change.kind, "")
    return f"  {_PUBLISH_SIGNS[change.kind]} {change.name}: {change.kind}{means}"
