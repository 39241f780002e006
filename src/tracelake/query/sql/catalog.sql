-- name: look
-- All that a query needs to know, in one statement and so of one moment: the caller's task, and for each relation
-- ($3 names, or the $4 versions that a token pins) its version, its committed ranges and its files. $5 and $6 are
-- the first and last block that the query can need of each, $7 the most files of one relation that are listed.
-- If files have no blocks of their rows, as the first file with rows shows, none is left out by blocks. Committed
-- ranges don't overlap, so the first that ends within the wanted blocks is the first of them, and all others begin
-- after it: an index finds both.
SELECT (SELECT row_to_json(t) FROM (
            SELECT task_id, attempt, status, last_outcome FROM catalog.task WHERE task_id = $1 AND org_id = $2) t
       )::text AS task,
       (SELECT json_agg(r) FROM (
            SELECT w.name, v.dataset, v.dataset_uuid, v.dataset_version, v.revision, v.storage, v.output_name,
                   v.operator, CASE WHEN v.buffered THEN v.buffer_schema END AS buffer_schema, v.hot_version,
                   s.file AS sample,
                   CASE WHEN v.hot_version IS NOT NULL THEN (
                        SELECT json_agg(json_build_object('start', lower(c.span), 'end', upper(c.span) - 1)
                                        ORDER BY c.span)
                        FROM (SELECT unnest(range_agg(int8range(p.range_start, p.range_end, '[]'))) AS span
                              FROM catalog.partition p
                              WHERE p.dataset_version = v.dataset_version
                                AND p.range_start BETWEEN b.low AND b.high) c) END AS cold,
                   (SELECT json_agg(f.file ORDER BY f.range_start, f.position)
                    FROM (SELECT f.range_start, f.position,
                                 json_build_array(f.location, f.bytes, f.min_block, f.max_block) AS file
                          FROM catalog.file f
                          WHERE f.dataset_version = v.dataset_version AND f.range_start BETWEEN b.low AND b.high
                            AND (f.min_block IS NULL OR (f.max_block >= w.first AND f.min_block <= w.last))
                          LIMIT $7 + 1) f) AS files
            FROM unnest($3::text[], $4::uuid[], $5::bigint[], $6::bigint[]) AS w(name, version, first, last)
            JOIN catalog.dataset_version v
              ON v.org_id = $2 AND v.dataset_version = coalesce(
                    w.version, (SELECT n.dataset_version FROM catalog.dataset_version n
                                WHERE n.org_id = $2 AND n.dataset = w.name AND n.is_current))
            LEFT JOIN LATERAL (
                SELECT json_build_array(f.location, f.bytes, f.min_block, f.max_block) AS file,
                       f.min_block IS NULL AS blind
                FROM catalog.file f
                WHERE f.dataset_version = v.dataset_version AND f.range_start = coalesce(
                        (SELECT p.range_start FROM catalog.partition p
                         WHERE p.dataset_version = v.dataset_version AND p.row_count > 0
                         ORDER BY p.range_start LIMIT 1),
                        (SELECT p.range_start FROM catalog.partition p
                         WHERE p.dataset_version = v.dataset_version AND p.files <> '[]'
                         ORDER BY p.range_start LIMIT 1))
                ORDER BY coalesce(f.rows, 1) = 0, f.position LIMIT 1) s ON true
            CROSS JOIN LATERAL (
                SELECT (SELECT p.range_start FROM catalog.partition p
                        WHERE p.dataset_version = v.dataset_version
                          AND p.range_end >= CASE WHEN s.blind THEN 0 ELSE w.first END
                        ORDER BY p.range_end LIMIT 1) AS low,
                       CASE WHEN s.blind THEN 9223372036854775807 ELSE w.last END AS high) b
       ) r)::text AS relations

-- name: user
-- The owner of a bearer token.
SELECT user_id, org_id, name FROM catalog.user_token WHERE token_hash = $1

-- name: published
-- Names of published datasets, for the error about an unknown one.
SELECT dataset FROM catalog.dataset_version WHERE org_id = $1 AND is_current AND dataset IS NOT NULL
ORDER BY dataset LIMIT $2

-- name: check
-- Whether the views can be read.
SELECT 1 FROM catalog.dataset_version LIMIT 1

-- name: now
-- The time that tokens are issued at.
SELECT statement_timestamp() AS now
