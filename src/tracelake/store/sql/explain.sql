-- name: explained_task
-- A task with the times of its steps.
SELECT t.task_id, t.job_id, j.dag_name, j.name AS job, j.operator, j.runtime, t.kind, t.status, t.attempt,
       t.range_start AS start, t.range_end AS "end", t.cause, t.inputs, t.created_at, t.woken_at, t.ended_at,
       t.error_message, tl_now() AS now
FROM task t JOIN job j USING (job_id) WHERE t.task_id = $1

-- name: attempts_upto
-- An attempt and the last ones before it.
SELECT attempt, worker_id, claimed_at, ended_at, outcome, error_message
FROM attempt WHERE task_id = $1 AND attempt <= $2 ORDER BY attempt DESC LIMIT $3

-- name: triggering_inputs
-- The triggering inputs of a job, and their producers.
SELECT ji.input_index, ji.dataset_uuid, ji.dataset_version, d.published_name AS dataset, d.dag_name,
       d.job_name AS job, dv.output_name
FROM job_input ji JOIN dataset d USING (dataset_uuid) JOIN dataset_version dv USING (dataset_version)
WHERE ji.job_id = $1 AND ji.trigger ORDER BY ji.input_index

-- name: event_of_partition
-- The commit of a scope that is still current, or of the last scope of an update, with its event; from indexes
-- alone. Events of manual sources have no task.
SELECT p.task_id, p.attempt, p.committed_at, e.event_id, e.kind, e.range_start, e.range_end, e.created_at
FROM partition p LEFT JOIN LATERAL (
    (SELECT event_id, kind, range_start, range_end, created_at FROM event
     WHERE event.task_id = p.task_id AND event.attempt = p.attempt AND event.dataset_version = p.dataset_version
       AND event.kind = 'partition' AND event.range_start = p.range_start AND event.range_end = p.range_end
     ORDER BY event.revision DESC LIMIT 1)
    UNION ALL
    (SELECT event_id, kind, range_start, range_end, created_at FROM event
     WHERE p.task_id IS NULL AND event.task_id IS NULL AND event.attempt IS NULL
       AND event.dataset_version = p.dataset_version AND event.kind = 'partition'
       AND event.range_start = p.range_start AND event.range_end = p.range_end AND event.created_at <= $4
     ORDER BY event.event_id DESC LIMIT 1)) e ON true
WHERE p.dataset_version = $1 AND p.current AND p.range_end = $3 AND ($2::bigint IS NULL OR p.range_start = $2)
  AND p.committed_at <= $4
ORDER BY p.partition_id DESC LIMIT 1

-- name: event_before
-- The event of a version that was the last to reach a scope before a moment. Ids rise with time, so the moment's
-- place among them is found by bisection; from there a bounded number is searched.
WITH RECURSIVE search(low, high) AS (
    SELECT 0::bigint, coalesce((SELECT max(event_id) FROM event), 0)
    UNION ALL
    SELECT CASE WHEN probe.created_at <= $2 THEN probe.event_id ELSE low END,
           CASE WHEN probe.created_at <= $2 THEN high ELSE (low + high + 1) / 2 - 1 END
    FROM search CROSS JOIN LATERAL (
        SELECT event_id, created_at FROM event WHERE event_id >= (low + high + 1) / 2 ORDER BY event_id LIMIT 1) probe
    WHERE low < high
), seen AS (
    SELECT event_id, kind, range_start, range_end, state, created_at, task_id, attempt FROM event
    WHERE dataset_version = $1 AND event_id <= (SELECT max(low) FROM search) ORDER BY event_id DESC LIMIT $5
)
SELECT * FROM seen
WHERE state = 'counted' AND kind <> 'invalidation' AND (
      $4::bigint IS NULL OR (kind = 'cursor' AND range_end >= $4)
      OR (kind = 'partition' AND range_end = $4 AND ($3::bigint IS NULL OR range_start = $3)))
ORDER BY CASE WHEN $4::bigint IS NOT NULL THEN range_end - $4 END, event_id DESC LIMIT 1

-- name: invalidation_at
-- The invalidation that gave a version this revision.
SELECT range_start AS start, range_end AS "end", revision, reason, task_id, created_at AS at
FROM invalidation WHERE dataset_version = $1 AND revision = $2

-- name: invalidations_in
-- The newest invalidations of a range, up to a moment.
SELECT range_start AS start, range_end AS "end", revision, reason, task_id, created_at AS at
FROM invalidation
WHERE dataset_version = $1 AND range_end >= $2 AND range_start <= $3 AND created_at <= coalesce($4::timestamptz, 'infinity')
ORDER BY revision DESC LIMIT $5

-- name: explained_dataset
-- A dataset's current version and its producer.
SELECT d.published_name AS dataset, d.dataset_uuid, dv.dataset_version, dv.storage, d.dag_name, d.job_name AS job,
       j.operator, j.job_id,
       CASE WHEN j.operator = 'block_follower' THEN coalesce(j.config->>'verify', 'full') END AS verified,
       (SELECT t.task_id FROM task t WHERE t.job_id = j.job_id AND t.kind = 'source') AS source_task
FROM dataset_version dv JOIN dataset d USING (dataset_uuid) LEFT JOIN job j ON j.job_id = dv.job_id
WHERE dv.dataset_version = $1

-- name: inputs_of_job
-- The inputs of a job.
SELECT d.published_name AS dataset, ji.dataset_uuid, d.dag_name, d.job_name AS job, dv.output_name, ji.trigger
FROM job_input ji JOIN dataset d USING (dataset_uuid) JOIN dataset_version dv USING (dataset_version)
WHERE ji.job_id = $1 ORDER BY ji.input_index

-- name: partitions_in
-- Current partitions that touch a range, by block; $4 is where the first of them may begin.
SELECT p.range_start AS start, p.range_end AS "end", p.revision, p.task_id, p.attempt, p.committed_at, p.row_count,
       p.location, a.worker_id, a.claimed_at, t.created_at, p.manifest->>'verified' AS verified,
       p.manifest->>'schema_hash' AS schema_hash, p.manifest->'endpoints' AS endpoints,
       jsonb_array_length(p.manifest->'files') AS files,
       (SELECT sum((f->>'bytes')::bigint)::bigint FROM jsonb_array_elements(p.manifest->'files') f) AS bytes
FROM partition p
LEFT JOIN attempt a ON a.task_id = p.task_id AND a.attempt = p.attempt
LEFT JOIN task t ON t.task_id = p.task_id
WHERE p.dataset_version = $1 AND p.current AND p.range_start BETWEEN $4 AND $3 AND p.range_end >= $2
ORDER BY p.range_start, p.range_end LIMIT $5

-- name: attempts_before
-- The attempts before those given, of the same tasks, the last ones first.
SELECT q.task_id, q.attempt AS of, a.attempt, a.worker_id, a.outcome, a.error_message
FROM unnest($1::uuid[], $2::int[]) AS q(task_id, attempt)
CROSS JOIN LATERAL (
    SELECT * FROM attempt WHERE attempt.task_id = q.task_id AND attempt.attempt < q.attempt
    ORDER BY attempt.attempt DESC LIMIT $3) a

-- name: source_commits_in
-- The commits of each attempt of an always-on source in a range, up to the commit that reached its end. Of a source
-- that was restarted very often only the last attempts are searched.
WITH attempts AS MATERIALIZED (
    SELECT attempt, worker_id, claimed_at, progress FROM attempt WHERE task_id = $1 ORDER BY attempt DESC LIMIT $5
), reached AS (
    SELECT min(e.range_start) AS last FROM attempts CROSS JOIN LATERAL (
        SELECT range_start FROM event
        WHERE task_id = $1 AND attempt = attempts.attempt AND dataset_version = $2 AND kind = 'cursor'
          AND range_start >= $4
        ORDER BY range_start LIMIT 1) e
)
SELECT c.*, $1::uuid AS task_id, a.attempt, a.worker_id, a.claimed_at, t.created_at,
       string_to_array(a.progress->>'endpoints', ', ') AS endpoints
FROM attempts a JOIN task t ON t.task_id = $1
CROSS JOIN LATERAL (
    SELECT count(*) AS commits, min(range_end) AS first, max(range_end) AS "end", max(revision) AS revision,
           max(created_at) AS committed_at, (array_agg(event_id ORDER BY range_end, event_id))[1] AS first_event
    FROM (SELECT event_id, range_end, revision, created_at FROM event
          WHERE task_id = $1 AND attempt = a.attempt AND dataset_version = $2 AND kind = 'cursor'
            AND range_start BETWEEN $3 AND coalesce((SELECT last FROM reached), $4)
          ORDER BY range_start LIMIT $6) e) c
WHERE c.commits > 0 ORDER BY c.first, a.attempt

-- name: update_commits_in
-- Likewise for a job whose every update is a task of its own: among the newest events of the version.
WITH seen AS MATERIALIZED (
    SELECT event_id, task_id, attempt, kind, state, range_end, revision, created_at FROM event
    WHERE dataset_version = $1 ORDER BY event_id DESC LIMIT $4
), commits AS (
    SELECT * FROM seen WHERE kind = 'cursor' AND state = 'counted'
), reached AS (
    SELECT min(range_end) AS last FROM commits WHERE range_end >= $3
)
SELECT c.*, a.worker_id, a.claimed_at, t.created_at, NULL AS endpoints
FROM (
    SELECT task_id, attempt, count(*) AS commits, min(range_end) AS first, max(range_end) AS "end",
           max(revision) AS revision, max(created_at) AS committed_at,
           (array_agg(event_id ORDER BY range_end, event_id))[1] AS first_event
    FROM commits WHERE range_end BETWEEN $2 AND coalesce((SELECT last FROM reached), $3)
    GROUP BY task_id, attempt) c
LEFT JOIN attempt a ON a.task_id = c.task_id AND a.attempt = c.attempt
LEFT JOIN task t ON t.task_id = c.task_id
ORDER BY c.first, c.committed_at LIMIT $5

-- name: before_events
-- The beginnings of the first commits of some attempts: behind the version's cursor before them, or at an
-- invalidated range.
SELECT q.event_id, before.kind, before.range_start, before.range_end
FROM unnest($2::bigint[]) AS q(event_id) CROSS JOIN LATERAL (
    SELECT kind, range_start, range_end FROM event
    WHERE event.dataset_version = $1 AND event.event_id < q.event_id AND kind <> 'partition' AND state = 'counted'
    ORDER BY event.event_id DESC LIMIT 1) before

-- name: has_more_events
-- Whether a version has more events than these.
SELECT count(*) > $2 AS more FROM (SELECT 1 FROM event WHERE dataset_version = $1 LIMIT $2 + 1) e
