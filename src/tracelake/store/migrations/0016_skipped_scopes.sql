-- Scopes for which a job needs no task, since no row of its triggering inputs can match their `where`.
CREATE TABLE skipped_scope (
    job_id      uuid NOT NULL,
    range_start bigint NOT NULL,
    range_end   bigint NOT NULL,
    skipped_at  timestamptz NOT NULL DEFAULT tl_now(),
    PRIMARY KEY (job_id, range_start, range_end)
);
