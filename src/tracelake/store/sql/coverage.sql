-- name: first_reaching
-- Where the first stored partition that reaches a block begins: they don't overlap, so none before it does.
SELECT range_start FROM partition WHERE dataset_version = $1 AND current AND range_end >= $2
ORDER BY range_end LIMIT 1

-- name: extent
-- The first and last block of a version, its producer, and its cursor.
SELECT (SELECT min(range_start) FROM partition WHERE dataset_version = $1 AND current) AS first,
       (SELECT max(range_end) FROM partition WHERE dataset_version = $1 AND current) AS last,
       dc.cursor, dv.storage, j.config->'start_block' AS start_block
FROM dataset_version dv LEFT JOIN dataset_cursor dc USING (dataset_version) LEFT JOIN job j USING (job_id)
WHERE dv.dataset_version = $1

-- name: gaps_before_partitions
-- A page of the gaps before each partition, walked once in their order; announcements may overlap.
SELECT gap_start, gap_end FROM (
    SELECT greatest(coalesce(max(range_end) OVER (ORDER BY range_start, range_end
                                                  ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) + 1, $2), $2)
               AS gap_start,
           least(range_start - 1, $3) AS gap_end
    FROM partition
    WHERE dataset_version = $1 AND current AND range_start BETWEEN $4 AND $3 AND range_end >= $2) walked
WHERE gap_end >= gap_start LIMIT $5

-- name: last_stored
-- The last block of the last stored partition that begins at or before another block.
SELECT range_end AS last FROM partition WHERE dataset_version = $1 AND current AND range_start <= $2
ORDER BY range_start DESC LIMIT 1

-- name: last_announced
-- Likewise for announcements, of which an earlier one may reach further.
SELECT max(range_end) AS last FROM partition WHERE dataset_version = $1 AND current AND range_start <= $2

-- name: active_jobs
-- The jobs that a backfill could go through.
SELECT j.job_id, j.dag_name, j.name, j.operator, j.source_kind, j.execution_strategy, j.config,
       j.paused AND NOT EXISTS (SELECT 1 FROM job_pause p WHERE p.job_id = j.job_id AND p.caused_by IS NOT NULL
                                  AND NOT EXISTS (SELECT 1 FROM job_pause q
                                                  WHERE q.job_id = j.job_id AND q.caused_by IS NULL)) AS paused,
       j.max_concurrency,
       EXISTS (SELECT 1 FROM dataset_version dv WHERE dv.job_id = j.job_id AND dv.storage <> 'none') AS stores
FROM job j WHERE j.active

-- name: triggering_edges
-- The edges of the graph that trigger.
SELECT DISTINCT dv.job_id AS producer, ji.job_id AS consumer
FROM job_input ji JOIN job j ON j.job_id = ji.job_id AND j.active JOIN dataset_version dv USING (dataset_version)
WHERE ji.trigger AND dv.job_id IS NOT NULL

-- name: backfill_state
-- The part of a range that a job has committed in all its outputs, and the missing part that is not scheduled: no
-- task covers it and no job before this one is about to announce it. In one statement, since all of it changes.
WITH wanted AS (
    SELECT int8multirange(int8range($2, $3, '[]')) AS span
), outputs AS (
    SELECT coalesce((SELECT range_agg(int8range(p.range_start, p.range_end, '[]')) FROM partition p
                     WHERE p.dataset_version = dv.dataset_version AND p.current
                       AND p.range_start <= $3 AND p.range_end >= $2), '{}'::int8multirange) AS span
    FROM dataset_version dv WHERE dv.job_id = $1 AND dv.storage <> 'none'
), missing AS MATERIALIZED (
    SELECT wanted.span - (SELECT range_intersect_agg(outputs.span) FROM outputs) AS span FROM wanted
), asked AS (
    SELECT range_agg(int8range(a.range_start, a.range_end, '[]')) AS span FROM (
        SELECT p.range_start, p.range_end FROM job_input ji JOIN partition p USING (dataset_version)
        WHERE ji.job_id = $1 AND ji.trigger AND p.current AND p.range_start <= $3 AND p.range_end >= $2
        UNION ALL
        SELECT t.range_start, t.range_end FROM task t
        WHERE t.job_id = ANY($4::uuid[]) AND t.kind = 'partition' AND t.status <> 'Completed'
          AND t.range_start <= $3 AND t.range_end >= $2
        UNION ALL
        SELECT h.range_start, h.range_end FROM held_scope h
        WHERE h.job_id = ANY($4::uuid[]) AND h.range_start <= $3 AND h.range_end >= $2
        UNION ALL
        SELECT e.range_start, e.range_end FROM dataset_version dv JOIN event e USING (dataset_version)
        WHERE dv.job_id = $8 AND e.state = 'held' AND e.kind = 'partition'
          AND e.range_start <= $3 AND e.range_end >= $2) a
), unasked AS MATERIALIZED (
    SELECT missing.span - coalesce(asked.span, '{}'::int8multirange) AS span FROM missing, asked
), pieces AS (
    SELECT 'missing' AS what, lower(r) AS first, upper(r) - 1 AS last FROM missing, unnest(missing.span) AS r
    UNION ALL
    SELECT 'unasked', lower(r), upper(r) - 1 FROM unasked, unnest(unasked.span) AS r
), cells AS (
    SELECT what, first, last,
           greatest(first / $5::bigint,
                    coalesce(lag(last / $5::bigint) OVER (PARTITION BY what ORDER BY first) + 1, 0)) AS first_cell
    FROM pieces
), page AS (
    SELECT first, last FROM pieces WHERE what = 'unasked'
    ORDER BY CASE WHEN $6 THEN -first ELSE first END LIMIT $7
)
SELECT (SELECT span::text FROM missing) AS missing,
       coalesce(sum(last - first + 1) FILTER (WHERE what = 'missing'), 0)::bigint AS missing_blocks,
       coalesce(sum(last / $5::bigint - first_cell + 1) FILTER (WHERE what = 'missing'), 0)::bigint AS missing_chunks,
       coalesce(sum(last / $5::bigint - first_cell + 1) FILTER (WHERE what = 'unasked'), 0)::bigint AS unasked_chunks,
       (SELECT coalesce(array_agg(first ORDER BY CASE WHEN $6 THEN -first ELSE first END), '{}') FROM page) AS starts,
       (SELECT coalesce(array_agg(last ORDER BY CASE WHEN $6 THEN -first ELSE first END), '{}') FROM page) AS ends
FROM cells

-- name: holds_of_jobs
-- Which of these jobs are held because of others.
SELECT j.dag_name, j.name AS job, p.bulk_only, p.cause FROM job_pause p JOIN job j USING (job_id)
WHERE p.job_id = ANY($1::uuid[]) AND p.caused_by IS NOT NULL ORDER BY p.since, j.name

-- name: live_tasks_in_range
-- Numbers of waiting and running tasks of a job, and of those before it, in a range.
SELECT count(*) FILTER (WHERE status = 'Queued') AS queued, count(*) FILTER (WHERE status = 'Running') AS running
FROM (SELECT status FROM task WHERE job_id = ANY($1::uuid[]) AND status = 'Queued' AND kind = 'partition'
        AND range_start <= $3 AND range_end >= $2
      UNION ALL
      SELECT status FROM task WHERE job_id = ANY($1::uuid[]) AND status = 'Running' AND kind = 'partition'
        AND range_start <= $3 AND range_end >= $2) t

-- name: failed_tasks_in_range
-- Tasks of these jobs that only a person can retry: the last of their scope, of which a part is still missing.
SELECT t.task_id, t.job_id, t.status, t.range_start, t.range_end, t.error_message, count(*) OVER () AS total
FROM task t
WHERE t.job_id = ANY($1::uuid[]) AND t.status IN ('Failed', 'Canceled') AND t.kind = 'partition'
  AND t.range_start <= $3 AND t.range_end >= $2
  AND int8range(t.range_start, t.range_end, '[]') && $4::text::int8multirange
  AND NOT EXISTS (SELECT 1 FROM task later
                  WHERE later.kind = 'partition' AND later.job_id = t.job_id AND later.range_start = t.range_start
                    AND later.range_end = t.range_end AND later.seq > t.seq)
ORDER BY t.range_start LIMIT $5
