-- A trigger of a backfill: the task that it becomes is bulk work, also after it was kept.
ALTER TABLE source_request ADD COLUMN bulk boolean NOT NULL DEFAULT false;
