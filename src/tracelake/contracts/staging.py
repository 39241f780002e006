"""Names of the places where an attempt stages its outputs, until its completion commits them.

Each attempt has places of its own, so that a superseded one can't touch what its successor writes. Below the object
root a Parquet output has the folder

    dataset/<dataset>/version/<version>/<task>/<attempt>-<epoch>/

A Postgres output has tables in the data database's schema ``staging``, named by the function ``staging.new_name``:

    staging_<task>_<output>_<epoch>_<eight hexadecimal digits>
"""

from __future__ import annotations

import re
from uuid import UUID

_UUID = r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"
_FOLDER = re.compile(rf"dataset/{_UUID}/version/{_UUID}/{_UUID}/[0-9]+-[0-9]+/", re.ASCII)


def staging_folder(dataset_uuid: UUID, dataset_version: UUID, task_id: UUID, attempt: int, epoch: int) -> str:
    """The folder of an attempt's Parquet output, relative to the object root."""
    if attempt < 1 or epoch < 0:
        raise ValueError(f"not an attempt and epoch: {attempt}, {epoch}")
    return f"dataset/{dataset_uuid}/version/{dataset_version}/{task_id}/{attempt}-{epoch}/"


def is_in_staging_folder(path: str) -> bool:
    """Whether a path below the object root belongs to a single attempt."""
    # Not fullmatch: a path further inside belongs to the attempt too.
    return _FOLDER.match(path) is not None


def version_folder(path: str) -> str:
    """The folder of the dataset version that a file belongs to, relative to the object root like the file; for a
    file that lies elsewhere, its own folder."""
    parts = path.split("/")
    if parts[0] == "dataset" and parts[2:3] == ["version"] and len(parts) > 4:
        return "/".join(parts[:4])
    return "/".join(parts[:-1])


def staging_reference(task_id: UUID, attempt: int, epoch: int, output_index: int) -> str:
    """What a payload names as the staging of a Postgres output; the tables themselves get their names when made."""
    return f"postgres_table:staging_{task_id.hex}_{attempt}_{epoch}_{output_index}"


def is_staging_table(name: str, task_id: UUID, output_index: int, epoch: int | None) -> bool:
    """Whether a table was made for this output by the attempt that has this epoch."""
    own = f"staging_{task_id.hex}_{output_index}_{epoch}_[0-9a-f]{{8}}"
    return re.fullmatch(own, name) is not None
