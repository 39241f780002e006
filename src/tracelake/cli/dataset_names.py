"""How people name a dataset: by its published name, its uuid, or as DAG/JOB[/OUTPUT] where it has no name."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from tracelake.client import Client

HELP = "Published name, uuid, or DAG/JOB[/OUTPUT] (an output's name or number)."


def resolve(client: Client, text: str) -> str:
    """What the API knows it by."""
    if "/" not in text:
        return text
    dag, job, output = [*text.split("/", 2), ""][:3]
    if not dag or not job:
        raise typer.BadParameter(f"a job's output is written DAG/JOB/OUTPUT, not {text!r}")
    found = client.datasets(dag=dag, job=job, limit=1000).datasets
    if not found:
        raise typer.BadParameter(f"there is no active job {dag}/{job} with outputs")
    named = [each for each in found if output in ("", each.output_name, str(each.output_index))]
    if len(named) != 1:
        outputs = ", ".join(each.output_name for each in sorted(found, key=lambda each: each.output_index))
        raise typer.BadParameter(f"{dag}/{job} has the outputs {outputs}: name one, as {dag}/{job}/OUTPUT")
    return str(named[0].dataset_uuid)
