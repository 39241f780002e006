-- Backpressure: what waits is counted as it changes, a job may be held because of another one, and what a held job
-- would have been given is kept until it is released.

-- `bulk`: work that comes from a backfill, whatever the priority of its job. `stalled`: an input's scope was invalidated
-- after the task was made; it can't be claimed until that scope is committed again, so it doesn't count as waiting,
-- and the producers that must rebuild the scope aren't held because of it.
ALTER TABLE task ADD COLUMN bulk boolean NOT NULL DEFAULT false;
ALTER TABLE task ADD COLUMN stalled boolean NOT NULL DEFAULT false;
ALTER TABLE partition ADD COLUMN bulk boolean NOT NULL DEFAULT false;

-- Since when the oldest task of a job waits, and how many wait for a retry time.
CREATE INDEX task_ready ON task (job_id, ready_at) WHERE status = 'Queued' AND NOT stalled;
DROP INDEX task_parked;
CREATE INDEX task_parked ON task (job_id, bulk, seq) WHERE status = 'Queued' AND parked;

-- Rows are only added, so that no two steps wait for each other; the sum of a job's rows is its number of waiting
-- tasks. They are folded now and then.
CREATE TABLE queue_count (
    job_id  uuid NOT NULL,
    waiting bigint NOT NULL,
    bulk    bigint NOT NULL
) WITH (autovacuum_vacuum_threshold = 2000, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_cost_delay = 0,
        vacuum_truncate = false);

CREATE FUNCTION count_created_tasks() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO queue_count (job_id, waiting, bulk)
    SELECT job_id, count(*), count(*) FILTER (WHERE bulk) FROM created
    WHERE status = 'Queued' AND NOT stalled GROUP BY job_id;
    RETURN NULL;
END $$;
CREATE TRIGGER count_created AFTER INSERT ON task REFERENCING NEW TABLE AS created
    FOR EACH STATEMENT EXECUTE FUNCTION count_created_tasks();

CREATE FUNCTION count_moved_task() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    change int := CASE WHEN NEW.status = 'Queued' AND NOT NEW.stalled THEN 1 ELSE -1 END;
BEGIN
    INSERT INTO queue_count (job_id, waiting, bulk)
    VALUES (NEW.job_id, change, CASE WHEN NEW.bulk THEN change ELSE 0 END);
    RETURN NULL;
END $$;
CREATE TRIGGER count_moved AFTER UPDATE ON task FOR EACH ROW
    WHEN ((OLD.status = 'Queued' AND NOT OLD.stalled) IS DISTINCT FROM (NEW.status = 'Queued' AND NOT NEW.stalled))
    EXECUTE FUNCTION count_moved_task();

INSERT INTO queue_count (job_id, waiting, bulk)
SELECT job_id, count(*), 0 FROM task WHERE status = 'Queued' GROUP BY job_id;

-- Jobs that hold their producers: `over_since` is since when their pressure has been at 1 or above without a break.
CREATE TABLE pressure (
    job_id     uuid PRIMARY KEY REFERENCES job,
    tier       text NOT NULL CHECK (tier IN ('bulk', 'normal')),
    since      timestamptz NOT NULL,
    changed_at timestamptz NOT NULL,
    over_since timestamptz
);

-- A hold is a pause with a job as its cause; with `bulk_only`, only bulk work of the job is held. `chain` has the jobs
-- from it down to the cause. `bulk_held` says on the job's row whether there is such a one, as `paused` does for
-- the others. While there is a `backlog`, events wait behind those that were kept.
ALTER TABLE job_pause ADD COLUMN caused_by uuid REFERENCES job;
ALTER TABLE job_pause ADD COLUMN bulk_only boolean NOT NULL DEFAULT false;
ALTER TABLE job_pause ADD COLUMN chain text[];
ALTER TABLE job ADD COLUMN bulk_held boolean NOT NULL DEFAULT false;
ALTER TABLE job ADD COLUMN backlog boolean NOT NULL DEFAULT false;

-- Scopes that would have made tasks of a paused or held job, in the order of their events.
CREATE TABLE held_scope (
    seq         bigint GENERATED ALWAYS AS IDENTITY,
    job_id      uuid NOT NULL,
    range_start bigint NOT NULL,
    range_end   bigint NOT NULL,
    bulk        boolean NOT NULL,
    cause       jsonb,
    PRIMARY KEY (job_id, range_start, range_end)
);
CREATE INDEX held_scope_order ON held_scope (job_id, bulk, seq);

-- Events of sources that are held: recorded, and counted when the source is released.
ALTER TABLE event ADD COLUMN bulk boolean NOT NULL DEFAULT false;
ALTER TABLE event DROP CONSTRAINT event_state_check;
ALTER TABLE event ADD CONSTRAINT event_state_check
    CHECK (state IN ('counted', 'pending', 'old_version', 'old_revision', 'held'));
CREATE INDEX event_held ON event (dataset_version, bulk, event_id) WHERE state = 'held';

-- Maximum number of running tasks by operator, over all DAGs; its row is the gate of claims that count them.
CREATE TABLE operator_cap (
    operator      text PRIMARY KEY,
    max_in_flight int NOT NULL CHECK (max_in_flight >= 1)
);
