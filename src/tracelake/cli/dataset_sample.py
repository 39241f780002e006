"""Some rows of a dataset, by a query; where there can be none, why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tracelake.cli.query_table import print_rows
from tracelake.cli.show import print_heading
from tracelake.domain.errors import NotFound, TracelakeError

if TYPE_CHECKING:
    from tracelake.client import Client
    from tracelake.contracts.query_api import QueryResponse
    from tracelake.contracts.user_api import DatasetDetail


@dataclass(frozen=True, slots=True)
class Sample:
    """``missing`` is why there are no ``rows``; both are None when nobody asked."""

    rows: QueryResponse | None = None
    missing: str | None = None


def take_sample(client: Client, dataset: DatasetDetail, size: int) -> Sample:
    if size == 0:
        return Sample()
    if dataset.dataset is None:
        return Sample(missing="only published datasets can be queried")
    if dataset.storage == "none":
        return Sample(missing="it has no rows: its events are all there is")
    try:
        return Sample(client.query_rows(f'FROM "{dataset.dataset}"', limit=size))
    except NotFound:
        return Sample(missing="this installation has no Query Service")
    except TracelakeError as error:
        return Sample(missing=error.message)


def print_sample(sample: Sample) -> None:
    if sample.missing is not None:
        print_heading(f"no sample: {sample.missing}")
    if sample.rows is not None:
        print_heading("sample" if sample.rows.rows else "no rows yet")
        if sample.rows.rows:
            print_rows(sample.rows.columns, sample.rows.types, sample.rows.rows, indent=2)
