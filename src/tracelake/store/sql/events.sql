-- name: record_events
-- Every event is kept; the same one again is the same row. A pending one is counted by its completion.
INSERT INTO event AS e (org_id, dataset_version, task_id, attempt, kind, range_start, range_end, revision, state)
SELECT n.* FROM unnest($1::uuid[], $2::uuid[], $3::uuid[], $4::int[], $5::text[], $6::bigint[], $7::bigint[],
                       $8::bigint[], $9::text[]) AS n
ON CONFLICT (task_id, attempt, dataset_version, kind, range_start, range_end, revision)
DO UPDATE SET state = CASE WHEN e.state = 'pending' THEN excluded.state ELSE e.state END
RETURNING event_id, dataset_version, task_id, kind, range_start, range_end

-- name: count_of_attempt
-- How many different events an attempt has emitted, counted no further than the cap.
SELECT count(*) FROM (SELECT 1 FROM event WHERE task_id = $1 AND attempt = $2 LIMIT $3) AS emitted
