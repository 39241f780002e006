-- name: share_versions
-- Completions and events share the versions that they read and write; an invalidation locks them exclusively.
SELECT dataset_version, dataset_uuid, version_no, job_id, storage, revision, is_current
FROM dataset_version WHERE dataset_version = ANY($1::uuid[])
ORDER BY dataset_version FOR KEY SHARE

-- name: hold_versions
-- A completion that commits partitions of a chain: beside those that share the versions, but one at a time, so that of
-- two neighbours the second one sees the first.
SELECT dataset_version, dataset_uuid, version_no, job_id, storage, revision, is_current
FROM dataset_version WHERE dataset_version = ANY($1::uuid[])
ORDER BY dataset_version FOR NO KEY UPDATE

-- name: own_versions
-- An invalidation's versions, locked exclusively until it commits.
SELECT dataset_version, dataset_uuid, version_no, job_id, storage, revision, is_current
FROM dataset_version WHERE dataset_version = ANY($1::uuid[])
ORDER BY dataset_version FOR UPDATE

-- name: versions_by_id
-- Versions that a caller named, with the job name that may write them.
SELECT dv.dataset_version, dv.dataset_uuid, dv.version_no, dv.job_id, dv.storage, dv.revision, dv.is_current,
       d.dag_name, d.job_name
FROM dataset_version dv JOIN dataset d USING (dataset_uuid)
WHERE dv.dataset_version = ANY($1::uuid[])

-- name: datasets_by_name
-- Published names to datasets.
SELECT published_name, dataset_uuid FROM dataset WHERE org_id = $1 AND published_name = ANY($2::text[])

-- name: cursor_of
-- Up to where a version is committed, if it goes by a cursor.
SELECT cursor FROM dataset_cursor WHERE dataset_version = $1

-- name: advance_cursors
-- A cursor event is the commit of its cursor. Cursors only rise here; an invalidation lowers them.
WITH before AS (SELECT dataset_version, cursor FROM dataset_cursor WHERE dataset_version = ANY($1::uuid[]))
INSERT INTO dataset_cursor AS dc (dataset_version, cursor, finalized)
SELECT c.dataset_version, max(c.cursor), max(c.finalized)
FROM unnest($1::uuid[], $2::bigint[], $3::bigint[]) AS c(dataset_version, cursor, finalized)
GROUP BY c.dataset_version ORDER BY c.dataset_version
ON CONFLICT (dataset_version) DO UPDATE
SET cursor = greatest(dc.cursor, excluded.cursor), finalized = greatest(dc.finalized, excluded.finalized),
    updated_at = tl_now()
WHERE excluded.cursor > dc.cursor OR excluded.finalized > coalesce(dc.finalized, -1)
RETURNING dataset_version,
          coalesce((SELECT b.cursor FROM before b WHERE b.dataset_version = dc.dataset_version), -1) AS before

-- name: announce_scopes
-- Scopes of datasets without storage: announced again at a newer revision, they count again.
INSERT INTO partition AS p (dataset_version, version_no, range_start, range_end, stored, current, revision,
                            task_id, attempt, bulk)
SELECT DISTINCT ON (s.dataset_version, s.range_start, s.range_end)
       s.dataset_version, s.version_no, s.range_start, s.range_end, false, true,
       scope_revision(s.dataset_version, s.range_start, s.range_end), s.task_id, s.attempt, s.bulk
FROM unnest($1::uuid[], $2::bigint[], $3::bigint[], $4::bigint[], $5::uuid[], $6::int[], $7::boolean[])
    AS s(dataset_version, version_no, range_start, range_end, task_id, attempt, bulk)
ORDER BY s.dataset_version, s.range_start, s.range_end
ON CONFLICT (dataset_version, range_start, range_end) WHERE current DO NOTHING
RETURNING dataset_version, range_start, range_end

-- name: overlapping_partitions
-- Current stored partitions that a new one touches; it must cover them.
SELECT p.dataset_version, p.range_start, p.range_end
FROM unnest($1::bigint[], $2::bigint[], $3::bigint[]) AS s(version_no, range_start, range_end)
JOIN partition p ON int8range(p.version_no, p.version_no, '[]') && int8range(s.version_no, s.version_no, '[]')
    AND int8range(p.range_start, p.range_end, '[]') && int8range(s.range_start, s.range_end, '[]')
WHERE p.current AND p.stored AND NOT (p.range_start >= s.range_start AND p.range_end <= s.range_end)

-- name: neighbours
-- The current partitions right before and right after new ones, if their edges were recorded.
SELECT s.position, n.range_start, n.range_end, n.edges
FROM unnest($1::uuid[], $2::bigint[], $3::bigint[]) WITH ORDINALITY
    AS s(dataset_version, range_start, range_end, position)
CROSS JOIN LATERAL (
    (SELECT p.range_start, p.range_end, p.manifest->'edges' AS edges FROM partition p
     WHERE p.dataset_version = s.dataset_version AND p.current AND p.stored AND p.range_end = s.range_start - 1
     LIMIT 1)
    UNION ALL
    (SELECT p.range_start, p.range_end, p.manifest->'edges' AS edges FROM partition p
     WHERE p.dataset_version = s.dataset_version AND p.current AND p.stored AND p.range_start = s.range_end + 1
     LIMIT 1)) n
WHERE jsonb_typeof(n.edges) = 'object'

-- name: supersede_partitions
-- Partitions that a new stored one covers are no longer current.
UPDATE partition p SET current = false, uncommitted_at = tl_now()
FROM unnest($1::bigint[], $2::bigint[], $3::bigint[]) AS s(version_no, range_start, range_end)
WHERE p.current AND p.stored
    AND int8range(p.version_no, p.version_no, '[]') && int8range(s.version_no, s.version_no, '[]')
    AND int8range(p.range_start, p.range_end, '[]') && int8range(s.range_start, s.range_end, '[]')

-- name: commit_partitions
-- Point the partitions at the files that an attempt reported. No file is moved.
INSERT INTO partition (dataset_version, version_no, range_start, range_end, stored, current, revision, task_id,
                       attempt, epoch, location, manifest, row_count, bulk)
SELECT s.dataset_version, s.version_no, s.range_start, s.range_end, true, true,
       scope_revision(s.dataset_version, s.range_start, s.range_end), s.task_id, s.attempt, s.epoch, s.location,
       s.manifest, s.row_count, s.bulk
FROM unnest($1::uuid[], $2::bigint[], $3::bigint[], $4::bigint[], $5::uuid[], $6::int[], $7::bigint[],
            $8::text[], $9::jsonb[], $10::bigint[], $11::boolean[])
    AS s(dataset_version, version_no, range_start, range_end, task_id, attempt, epoch, location, manifest, row_count,
         bulk)
ORDER BY s.dataset_version, s.range_start
RETURNING dataset_version, range_start, range_end

-- name: consumers
-- The jobs that may get tasks by a change of these versions.
SELECT ji.dataset_version, ji.job_id, ji.input_index, j.execution_strategy, j.trigger_count
FROM job_input ji JOIN job j USING (job_id)
WHERE ji.dataset_version = ANY($1::uuid[]) AND ji.trigger AND j.active
ORDER BY ji.job_id, ji.input_index

-- name: scopes_reached_by_cursor
-- Scopes of the other inputs of a join that waited for this cursor: those that end where it has just passed. A
-- leap over very many is left to the reconciler but for the first of them, so that one event stays short.
SELECT DISTINCT ji.job_id, p.range_start, p.range_end
FROM unnest($1::uuid[], $2::uuid[], $3::bigint[], $4::bigint[]) AS c(job_id, dataset_version, before, cursor)
JOIN job_input ji ON ji.job_id = c.job_id AND ji.trigger AND ji.dataset_version <> c.dataset_version
CROSS JOIN LATERAL (
    SELECT p.range_start, p.range_end FROM partition p
    WHERE p.dataset_version = ji.dataset_version AND p.current
      AND p.range_end > c.before AND p.range_end <= c.cursor
    ORDER BY p.range_end LIMIT 1000) p

-- name: rewind_below_commit
-- A partition committed below the position of a PerUpdate job rewinds it to there.
UPDATE consumer_cursor cc SET cursor = s.range_start - 1
FROM (SELECT job_id, input_index, min(range_start) AS range_start
      FROM unnest($1::uuid[], $2::int[], $3::bigint[]) AS s(job_id, input_index, range_start)
      GROUP BY job_id, input_index) s
WHERE cc.job_id = s.job_id AND cc.input_index = s.input_index AND cc.cursor >= s.range_start

-- name: read_consumers
-- The positions of jobs, under their gates.
SELECT job_id, input_index, cursor, inv_revision FROM consumer_cursor WHERE job_id = ANY($1::uuid[])

-- name: filled_in_since
-- Those of these updates that read a range in which a partition was committed since their claim. A partition that
-- begins before the range has rewound the consumer instead.
SELECT DISTINCT r.task_id
FROM unnest($1::uuid[], $2::uuid[], $3::bigint[], $4::bigint[], $5::bigint[])
    AS r(task_id, dataset_version, after, upto, as_of)
CROSS JOIN LATERAL (
    SELECT 1 FROM partition p
    WHERE p.dataset_version = r.dataset_version AND p.current
      AND p.range_start > r.after AND p.range_start <= r.upto AND p.partition_id > r.as_of LIMIT 1) filled_in

-- name: advance_consumers
-- Compare-and-set, the comparison made under the job's gate in the same transaction.
UPDATE consumer_cursor cc
SET cursor = a.upto, inv_start = NULL, inv_end = NULL, inv_revision = NULL
FROM unnest($1::uuid[], $2::int[], $3::bigint[]) AS a(job_id, input_index, upto)
WHERE cc.job_id = a.job_id AND cc.input_index = a.input_index

-- name: committed_files
-- A page of the files behind a version's current partitions that touch a range, by block. Stored partitions don't
-- overlap, so the first that ends in the range is the first in it, and from there on they are found by their
-- start. A page goes on behind a file of the partition that the last one ended in.
SELECT p.partition_id, p.range_start AS start, p.range_end AS "end", f.position, f.file
FROM partition p CROSS JOIN LATERAL jsonb_array_elements(p.manifest->'files') WITH ORDINALITY AS f(file, position)
WHERE p.dataset_version = $1 AND p.current AND p.stored AND p.range_start <= $3
  AND p.range_start >= coalesce(
        (SELECT l.range_start FROM partition l WHERE l.partition_id = $4),
        (SELECT n.range_start FROM partition n WHERE n.dataset_version = $1 AND n.current AND n.range_end >= $2
         ORDER BY n.range_end LIMIT 1))
  AND ($4::bigint IS NULL OR p.partition_id <> $4 OR f.position > $5)
ORDER BY p.range_start, f.position LIMIT $6

-- name: is_current
-- Whether a partition of a version is still current.
SELECT current FROM partition WHERE partition_id = $1 AND dataset_version = $2

-- name: announced_within
-- Current scopes of a version that begin within any of these ranges.
SELECT p.range_start, p.range_end FROM unnest($2::bigint[], $3::bigint[]) AS s(first, last)
JOIN partition p ON p.dataset_version = $1 AND p.current AND p.range_start BETWEEN s.first AND s.last
ORDER BY p.range_start, p.range_end

-- name: last_announced
-- The last block of the last current partition of a version.
SELECT range_end FROM partition WHERE dataset_version = $1 AND current
ORDER BY range_start DESC, range_end DESC LIMIT 1

-- name: record_events
-- Every event is recorded; the same one again is the same row. A pending one is counted by its completion.
INSERT INTO event AS e (org_id, dataset_version, task_id, attempt, kind, range_start, range_end, revision, state,
                        bulk)
SELECT n.* FROM unnest($1::uuid[], $2::uuid[], $3::uuid[], $4::int[], $5::text[], $6::bigint[], $7::bigint[],
                       $8::bigint[], $9::text[], $10::boolean[]) AS n
ON CONFLICT (task_id, attempt, dataset_version, kind, range_start, range_end, revision)
DO UPDATE SET state = CASE WHEN e.state = 'pending' THEN excluded.state ELSE e.state END
RETURNING event_id, dataset_version, task_id, kind, range_start, range_end

-- name: count_of_attempt
-- The number of different events of an attempt, counted up to the limit.
SELECT count(*) FROM (SELECT 1 FROM event WHERE task_id = $1 AND attempt = $2 LIMIT $3) AS emitted
