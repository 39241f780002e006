-- name: own_clock
-- The test owns the time from here on: the database's, and as far ahead of it as was asked for.
CREATE TABLE test_clock (ahead interval NOT NULL);
INSERT INTO test_clock VALUES ('0');
CREATE OR REPLACE FUNCTION tl_now() RETURNS timestamptz LANGUAGE sql STABLE PARALLEL SAFE
    AS $$ SELECT statement_timestamp() + (SELECT ahead FROM test_clock) $$

-- name: clock_owned
-- Was the clock taken over before?
SELECT to_regclass('test_clock') IS NOT NULL AS owned

-- name: advance_clock
-- Time goes by.
UPDATE test_clock SET ahead = ahead + make_interval(secs => $1)

-- name: tasks_of_job
-- Tasks of every generation of a job in one of the states, oldest first.
SELECT t.task_id FROM task t JOIN job j USING (job_id)
WHERE j.name = $1 AND t.status = ANY($2::text[]) ORDER BY t.seq

-- name: task
-- One task as it stands.
SELECT t.*, j.name AS job, j.active, tl_now() AS now FROM task t JOIN job j USING (job_id) WHERE t.task_id = $1

-- name: attempts
-- The history of a task.
SELECT * FROM attempt WHERE task_id = $1 ORDER BY attempt

-- name: wakes
-- Wake-ups that wait in the outbox, due ones and later ones, oldest first.
SELECT task_id, runtime, payload, available_at, available_at <= tl_now() AS due FROM outbox
WHERE kind = 'wake' ORDER BY outbox_id

-- name: forget_wakes
-- Every message is lost.
DELETE FROM outbox

-- name: partitions
-- The current partitions of a job's output, whichever generation is active.
SELECT p.* FROM partition p JOIN dataset_version dv USING (dataset_version) JOIN job j USING (job_id)
WHERE j.name = $1 AND j.active AND dv.output_index = $2 AND p.current ORDER BY p.range_start, p.range_end

-- name: output
-- A job's output as it is now.
SELECT dv.dataset_uuid, dv.dataset_version, dv.revision, dc.cursor, dc.finalized
FROM job j JOIN dataset_version dv USING (job_id) LEFT JOIN dataset_cursor dc USING (dataset_version)
WHERE j.name = $1 AND j.active AND dv.output_index = $2

-- name: consumed
-- How far a PerUpdate job has read an input, and what it must undo.
SELECT cc.* FROM consumer_cursor cc JOIN job j USING (job_id)
WHERE j.name = $1 AND j.active AND cc.input_index = $2

-- name: events
-- All events, oldest first.
SELECT * FROM event ORDER BY event_id

-- name: fingerprint
-- All that must not change when a call changes nothing.
SELECT md5(concat(
    (SELECT string_agg(t::text, '|' ORDER BY t.task_id) FROM task t),
    (SELECT string_agg(a::text, '|' ORDER BY a.task_id, a.attempt) FROM attempt a),
    (SELECT string_agg(p::text, '|' ORDER BY p.partition_id) FROM partition p),
    (SELECT string_agg(e::text, '|' ORDER BY e.event_id) FROM event e),
    (SELECT string_agg(o::text, '|' ORDER BY o.outbox_id) FROM outbox o),
    (SELECT string_agg(i::text, '|' ORDER BY i.dataset_version, i.revision) FROM invalidation i),
    (SELECT string_agg(c::text, '|' ORDER BY c.dataset_version) FROM dataset_cursor c),
    (SELECT string_agg(c::text, '|' ORDER BY c.job_id, c.input_index) FROM consumer_cursor c),
    (SELECT string_agg(s::text, '|' ORDER BY s.job_id, s.key) FROM operator_state s),
    (SELECT string_agg(v::text, '|' ORDER BY v.version_no) FROM dataset_version v))) AS state

-- name: waiting_sessions
-- Sessions of this database that wait for another one's lock.
SELECT count(*) AS waiting FROM pg_stat_activity
WHERE datname = current_database() AND cardinality(pg_blocking_pids(pid)) > 0
