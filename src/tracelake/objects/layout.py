"""Where an attempt's files lie: ``{root}/dataset/{uuid}/version/{uuid}/{task_id}/{attempt}-{epoch}/``.

Nothing is renamed or copied at the commit, so this is where committed files stay as well. The place is
different for every attempt and, by the epoch, for the same attempt number after a restore from backup:
a superseded writer can go on writing without touching a file that anybody else reported.
"""

from __future__ import annotations

import re
from uuid import UUID

from tracelake.objects.prefix import ObjectLocation, ObjectPrefix

_UUID = r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"
_ATTEMPT = re.compile(rf"dataset/{_UUID}/version/{_UUID}/{_UUID}/[0-9]+-[0-9]+/", re.ASCII)


def staging_prefix(
    root: ObjectPrefix, dataset_uuid: UUID, dataset_version: UUID, task_id: UUID, attempt: int, epoch: int
) -> ObjectPrefix:
    if attempt < 1 or epoch < 0:
        raise ValueError(f"not an attempt and epoch: {attempt}, {epoch}")
    below = f"dataset/{dataset_uuid}/version/{dataset_version}/{task_id}/{attempt}-{epoch}/"
    return ObjectPrefix(root.scheme, root.bucket, root.path + below)


def bundle_location(root: ObjectPrefix, sha256: str) -> ObjectLocation:
    """Where a function's bundle lies: under the hash of its content, so it is never replaced by another."""
    return ObjectLocation(root.scheme, root.bucket, f"{root.path}bundle/{sha256}.zip")


def batch_location(root: ObjectPrefix, dataset_uuid: UUID, batch_id: UUID) -> ObjectLocation:
    """Where the records of a batch lie that is too large for its queue."""
    return ObjectLocation(root.scheme, root.bucket, f"{root.path}buffer/{dataset_uuid}/{batch_id}.json")


def is_staging(root: ObjectPrefix, prefix: ObjectPrefix) -> bool:
    """Whether the prefix belongs to a single attempt, so that removing it can't hurt another one."""
    return root.contains(prefix) and _ATTEMPT.match(prefix.path[len(root.path) :]) is not None
