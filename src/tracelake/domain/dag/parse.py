"""A DAG file to a ``DagSpec``, or to every problem in it at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec

from tracelake.domain.dag.check_graph import check_graph
from tracelake.domain.dag.check_jobs import check_job
from tracelake.domain.dag.check_publish import check_publish
from tracelake.domain.dag.fields import Fields
from tracelake.domain.dag.imply_inputs import imply_inputs
from tracelake.domain.dag.installation import Installation
from tracelake.domain.dag.job_fields import JOB_FIELDS, JOB_NAME, JobDraft, read_job
from tracelake.domain.dag.model import DagSpec, JobSettings
from tracelake.domain.dag.name_outputs import resolve_outputs
from tracelake.domain.dag.node import Map, Mark, Scalar, Seq, kind_of
from tracelake.domain.dag.problems import Path, Problems, fatal
from tracelake.domain.dag.publish_fields import read_publish
from tracelake.domain.dag.settings_fields import SETTINGS_FIELDS, read_settings
from tracelake.domain.dag.yaml_tree import read_tree

TOP_FIELDS = frozenset({"name", "defaults", "jobs", "publish"})
DEFAULTS_FIELDS = SETTINGS_FIELDS | {"runtime"}
MAX_JOBS = 1000
MAX_PREDICATES = 131_072
"""Characters of all ``where`` of a file: reading one takes a millisecond for a hundred of them."""


def parse_dag(text: str | bytes, installation: Installation) -> DagSpec:
    """Raises ``InvalidDag`` with all problems, each with line, column and field."""
    root, found = read_tree(text)
    if not isinstance(root, Map):
        raise fatal(root.mark, f"must be a map with name and jobs, not {kind_of(root)}")
    problems = Problems(root, found)
    top = Fields(root, (), problems, TOP_FIELDS)
    name = top.string("name", pattern=JOB_NAME) or ""
    drafts = imply_inputs(_read_jobs(top))
    publish = read_publish(top)
    outputs = resolve_outputs(drafts)
    drafts = [
        JobDraft(d.path, msgspec.structs.replace(d.spec, outputs=o), d.outputs, d.input_paths)
        for d, o in zip(drafts, outputs, strict=True)
    ]
    for draft in drafts:
        check_job(draft, installation, problems)
    check_graph(name, drafts, publish, installation, problems)
    check_publish(name, drafts, publish, installation, problems)
    problems.raise_if_any()
    return DagSpec(name, tuple(draft.spec for draft in drafts), tuple(draft.entry for draft in publish))


def locator(text: str | bytes) -> Callable[[Path], Mark]:
    """Finds the place of a path in a file that has been parsed, for problems that come up later."""
    return Problems(read_tree(text)[0]).mark


def _read_jobs(top: Fields) -> list[JobDraft]:
    settings, runtime = JobSettings(), None
    defaults = top.nested("defaults", DEFAULTS_FIELDS)
    if defaults is not None:
        settings = read_settings(defaults, settings)
        runtime = defaults.string("runtime", required=False)
    if not top.has("jobs"):
        top.wrong("jobs", "is required: a list of jobs")
    drafts: list[JobDraft] = []
    predicates = 0
    for entry in top.items("jobs", JOB_FIELDS):
        if len(drafts) == MAX_JOBS:
            top.wrong("jobs", f"more than {MAX_JOBS} jobs")
            break
        for where in _wheres(entry):
            predicates += len(str(where.value))
            if predicates > MAX_PREDICATES:
                what = f"where: this file has more than {MAX_PREDICATES} characters of predicates"
                raise fatal(where.mark, what)
        drafts.append(read_job(entry, settings, runtime))
    if not drafts:
        top.wrong("jobs", "must not be empty")
    return drafts


def _wheres(job: Fields) -> Iterator[Scalar]:
    """Predicates that are text; one that is a map is bounded by the number of its values."""
    inputs = job.node("inputs")
    for entry in inputs.items if isinstance(inputs, Seq) else ():
        where = entry.entries.get("where") if isinstance(entry, Map) else None
        if isinstance(where, Scalar):
            yield where
