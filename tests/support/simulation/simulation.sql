-- name: own_the_time
-- The one clock reads a row that the scheduler moves.
CREATE UNLOGGED TABLE IF NOT EXISTS sim_clock (now timestamptz NOT NULL);
CREATE OR REPLACE FUNCTION tl_now() RETURNS timestamptz LANGUAGE sql STABLE PARALLEL SAFE
    AS $$ SELECT now FROM sim_clock $$;
DO $$
DECLARE name text;
BEGIN
    FOR name IN SELECT tablename FROM pg_tables WHERE schemaname = 'public' LOOP
        EXECUTE format('ALTER TABLE %I SET (autovacuum_enabled = false)', name);
    END LOOP;
END $$

-- name: watch_holds
-- At its commit, a transaction that created or claimed a task is compared with the holds that are committed by then;
-- and while a job holds all its producers, a new task of it must come from work that had begun before.
CREATE TABLE IF NOT EXISTS sim_violation (name text, what text, at timestamptz);
CREATE OR REPLACE FUNCTION sim_note_violation() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF NEW.kind <> 'source' OR TG_OP = 'UPDATE' THEN
        INSERT INTO sim_violation
        SELECT j.name, CASE TG_OP WHEN 'INSERT' THEN 'created' ELSE 'claimed' END, tl_now()
        FROM job j JOIN job_pause p USING (job_id)
        WHERE j.job_id = NEW.job_id AND p.caused_by IS NOT NULL AND (NEW.bulk OR NOT p.bulk_only);
    END IF;
    IF TG_OP = 'INSERT' AND NEW.kind = 'partition' THEN
        INSERT INTO sim_violation
        SELECT j.name, 'fed by later work', tl_now()
        FROM job j JOIN pressure r ON r.job_id = j.job_id AND r.tier = 'normal'
        JOIN job_input ji ON ji.job_id = j.job_id AND ji.trigger
        JOIN partition p ON p.dataset_version = ji.dataset_version AND p.current
             AND p.range_start = NEW.range_start AND p.range_end = NEW.range_end
        LEFT JOIN attempt a ON a.task_id = p.task_id AND a.attempt = p.attempt
        WHERE j.job_id = NEW.job_id AND coalesce(a.claimed_at, p.committed_at) > r.changed_at;
    END IF;
    RETURN NULL;
END $$;
DROP TRIGGER IF EXISTS sim_created ON task;
DROP TRIGGER IF EXISTS sim_claimed ON task;
CREATE CONSTRAINT TRIGGER sim_created AFTER INSERT ON task DEFERRABLE INITIALLY DEFERRED
    FOR EACH ROW EXECUTE FUNCTION sim_note_violation();
CREATE CONSTRAINT TRIGGER sim_claimed AFTER UPDATE ON task DEFERRABLE INITIALLY DEFERRED
    FOR EACH ROW WHEN (NEW.status = 'Running' AND OLD.status <> 'Running') EXECUTE FUNCTION sim_note_violation()

-- name: violations
-- What was noted at commits.
SELECT name, what, at FROM sim_violation

-- name: still_held
-- The rest of holds when all jobs should have been released.
SELECT j.name, p.cause AS what FROM job_pause p JOIN job j USING (job_id) WHERE p.caused_by IS NOT NULL AND j.active
UNION ALL SELECT j.name, 'a kept scope' FROM held_scope h JOIN job j USING (job_id) WHERE j.active
UNION ALL SELECT j.name, 'a kept event' FROM event e JOIN dataset_version dv USING (dataset_version)
          JOIN job j USING (job_id) WHERE e.state = 'held' AND j.active

-- name: forget_everything
-- A new seed begins with empty tables and with sequences at their start.
DO $$
DECLARE names text;
BEGIN
    SELECT string_agg(format('%I', tablename), ', ') INTO names FROM pg_tables
    WHERE schemaname = 'public' AND tablename <> ALL (ARRAY['schema_migration', 'org', 'app_user', 'user_token']);
    EXECUTE 'TRUNCATE ' || names || ' RESTART IDENTITY';
    ALTER SEQUENCE epoch_seq RESTART;
END $$

-- name: start_clock
-- The row exists once.
INSERT INTO sim_clock (now) VALUES ($1)

-- name: set_clock
-- Time moves when the scheduler says so.
UPDATE sim_clock SET now = $1

-- name: own_session
-- What the title of this session's server process says.
SELECT current_database(), inet_client_port()

-- name: blockers
-- Who waits for whom.
SELECT pid, pg_blocking_pids(pid) AS blockers FROM unnest($1::int[]) AS pid

-- name: committed_partitions
-- What a reader of a version finds committed in a range.
SELECT range_start, range_end, location FROM partition
WHERE dataset_version = $1 AND current AND range_start <= $3 AND range_end >= $2
ORDER BY range_start, range_end

-- name: reader_cursor
-- How far a version is committed.
SELECT cursor FROM dataset_cursor WHERE dataset_version = $1

-- name: unfinished
-- Tasks that are neither done, nor a source that runs for ever, nor wait for an invalidated scope. Where the sweep
-- is off ($1 is false), tasks that a later one of their scope has replaced are still open.
SELECT t.task_id, j.name, t.kind, t.status, t.attempt, t.range_start, t.range_end, t.ready_at, j.active, j.paused
FROM task t JOIN job j USING (job_id)
WHERE t.status IN ('Queued', 'Running') AND NOT (t.kind = 'source' AND j.active)
  AND NOT (t.status = 'Queued' AND t.kind = 'partition' AND j.active AND EXISTS (
        SELECT 1 FROM job_input ji
        WHERE ji.job_id = t.job_id AND ji.trigger
          AND NOT EXISTS (SELECT 1 FROM partition p
                          WHERE p.dataset_version = ji.dataset_version AND p.current
                            AND p.range_start = t.range_start AND p.range_end = t.range_end)
          AND NOT EXISTS (SELECT 1 FROM dataset_cursor dc
                          WHERE dc.dataset_version = ji.dataset_version AND dc.cursor >= t.range_end)))
  AND NOT (NOT $1::boolean AND t.status = 'Queued' AND t.kind = 'partition' AND EXISTS (
        SELECT 1 FROM task later
        WHERE later.job_id = t.job_id AND later.range_start = t.range_start AND later.range_end = t.range_end
          AND later.seq > t.seq))
ORDER BY t.seq

-- name: given_up
-- Work of active jobs that ended without being done.
SELECT t.task_id, j.name, t.kind, t.status, t.range_start, t.range_end, t.error_message
FROM task t JOIN job j USING (job_id)
WHERE t.status IN ('Failed', 'Canceled') AND j.active ORDER BY t.seq

-- name: paused_jobs
-- Jobs that a user has paused.
SELECT j.dag_name, j.name FROM job j JOIN job_pause p USING (job_id)
WHERE j.active AND p.caused_by IS NULL ORDER BY j.name
