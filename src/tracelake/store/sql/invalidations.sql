-- name: known_invalidation
-- An invalidation with this id; if there is one, it was applied already.
SELECT revision, range_start, range_end FROM invalidation WHERE dataset_version = $1 AND invalidation_id = $2

-- name: known_invalidations
-- Those of these ids that were applied already.
SELECT invalidation_id FROM invalidation WHERE dataset_version = $1 AND invalidation_id = ANY($2::text[])

-- name: downstream
-- Every version and job that an invalidation of this version may reach, retired generations included: a rollback
-- activates them again.
WITH RECURSIVE reached AS (
    SELECT $1::uuid AS dataset_version, NULL::uuid AS job_id
    UNION
    SELECT dv.dataset_version, ji.job_id
    FROM reached r JOIN job_input ji ON ji.dataset_version = r.dataset_version AND ji.trigger
    LEFT JOIN dataset_version dv ON dv.job_id = ji.job_id
)
SELECT dataset_version, job_id FROM reached

-- name: raise_revision
-- The version's revision counts its invalidations.
UPDATE dataset_version SET revision = revision + 1 WHERE dataset_version = $1 RETURNING revision

-- name: record_invalidation
-- The invalidation itself; the scopes it touches have its revision from now on.
INSERT INTO invalidation (dataset_version, invalidation_id, range_start, range_end, revision, reason, task_id)
VALUES ($1, $2, $3, $4, $5, $6, $7)

-- name: rewind_producer
-- The dataset's cursor goes back to before the invalidated range.
UPDATE dataset_cursor
SET cursor = $2 - 1, finalized = CASE WHEN finalized >= $2 THEN $2 - 1 ELSE finalized END, updated_at = tl_now()
WHERE dataset_version = $1 AND cursor >= $2

-- name: uncommit_partitions
-- Partitions that hold a part of the invalidated range are no longer current.
UPDATE partition SET current = false, uncommitted_at = tl_now()
WHERE dataset_version = $1 AND current AND range_start <= $3 AND range_end >= $2
RETURNING range_start, range_end

-- name: rewind_consumers
-- Consumers that have read the invalidated range, or are reading it, are rewound and remember what to undo. So are
-- those that tried: an attempt that failed for good or was canceled may have published before. One from before the
-- consumer's current position was repeated since.
UPDATE consumer_cursor cc
SET cursor = least(cc.cursor, $2 - 1), inv_start = least(cc.inv_start, $2), inv_end = greatest(cc.inv_end, $3),
    inv_revision = $4
FROM job_input ji
WHERE ji.dataset_version = $1 AND ji.trigger AND cc.job_id = ji.job_id AND cc.input_index = ji.input_index
  AND (cc.cursor >= $2 OR EXISTS (
        SELECT 1 FROM task t, jsonb_array_elements(t.inputs) AS i
        WHERE t.job_id = cc.job_id AND t.kind = 'cursor' AND t.status IN ('Queued', 'Running') AND t.attempt > 0
          AND (i->>'input_index')::int = cc.input_index AND (i->>'upto')::bigint >= $2)
      OR EXISTS (
        SELECT 1 FROM task t, jsonb_array_elements(t.inputs) AS i
        WHERE t.job_id = cc.job_id AND t.kind = 'cursor' AND t.status IN ('Failed', 'Canceled') AND t.attempt > 0
          AND read_upto(t.inputs) >= $2 AND (i->>'input_index')::int = cc.input_index
          AND (i->>'upto')::bigint >= $2 AND (i->>'after')::bigint >= cc.cursor))
RETURNING cc.job_id

-- name: rewind_job
-- A PerUpdate job whose own partitions were invalidated reads their inputs again, from the beginning of the input
-- partition that holds them.
UPDATE consumer_cursor cc
SET cursor = least(cc.cursor, coalesce(
        (SELECT CASE WHEN p.range_end >= $2 THEN p.range_start END FROM partition p
         WHERE p.dataset_version = ji.dataset_version AND p.current AND p.range_start <= $2
         ORDER BY p.range_start DESC, p.range_end DESC LIMIT 1), $2) - 1)
FROM job_input ji
WHERE cc.job_id = $1 AND ji.job_id = cc.job_id AND ji.input_index = cc.input_index AND cc.cursor >= $2

-- name: consumers_with_outputs
-- The jobs downstream of a version, by strategy, with the versions that they write.
SELECT DISTINCT j.job_id, j.execution_strategy, j.update_strategy, j.active, dv.dataset_version
FROM job_input ji JOIN job j USING (job_id) LEFT JOIN dataset_version dv ON dv.job_id = j.job_id
WHERE ji.dataset_version = $1 AND ji.trigger
ORDER BY j.job_id, dv.dataset_version

-- name: materialized_hull
-- The hull of a version's partitions that touch a range, and whether its cursor is beyond.
SELECT (SELECT min(range_start) FROM partition
        WHERE dataset_version = $1 AND current AND range_start <= $3 AND range_end >= $2) AS first,
       (SELECT max(range_end) FROM partition
        WHERE dataset_version = $1 AND current AND range_start <= $3 AND range_end >= $2) AS last,
       EXISTS (SELECT 1 FROM dataset_cursor WHERE dataset_version = $1 AND cursor >= $2) AS cursor_beyond

-- name: overlapping_invalidations
-- Those of these tasks that worked on a range which another task has invalidated meanwhile.
SELECT DISTINCT q.task_id
FROM unnest($1::uuid[], $2::uuid[], $3::bigint[], $4::bigint[], $5::bigint[])
    AS q(task_id, dataset_version, revision, range_start, range_end)
CROSS JOIN LATERAL (
    SELECT 1 FROM invalidation i
    WHERE i.dataset_version = q.dataset_version AND i.revision > q.revision
      AND i.range_start <= q.range_end AND i.range_end >= q.range_start
      AND i.task_id IS DISTINCT FROM q.task_id LIMIT 1) taken_back

-- name: scope_revisions
-- The revision of scopes, with which an event's own revision is compared.
SELECT q.ordinality AS position, scope_revision(q.dataset_version, q.range_start, q.range_end) AS revision
FROM unnest($1::uuid[], $2::bigint[], $3::bigint[]) WITH ORDINALITY
    AS q(dataset_version, range_start, range_end, ordinality)

-- name: written_by_source
-- A source's position in its outputs, and the ranges that others have invalidated and that it hasn't written again:
-- its cursor isn't beyond them yet.
SELECT dv.dataset_version, dc.cursor, dc.finalized, back.starts, back.ends
FROM dataset_version dv LEFT JOIN dataset_cursor dc USING (dataset_version)
CROSS JOIN LATERAL (
    SELECT array_agg(lower(r)) AS starts, array_agg(upper(r) - 1) AS ends
    FROM unnest((SELECT range_agg(int8range(i.range_start, i.range_end, '[]')) FROM invalidation i
                 WHERE i.dataset_version = dv.dataset_version AND i.range_end > coalesce(dc.cursor, -1)
                   AND i.task_id IS DISTINCT FROM $2)) AS r) back
WHERE dv.job_id = $1

-- name: producer_job
-- The job that writes a version.
SELECT job_id FROM dataset_version WHERE dataset_version = $1
