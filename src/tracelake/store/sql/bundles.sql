-- name: add
-- The same bundle again is the bundle that is there.
INSERT INTO bundle (sha256, org_id, bytes, unpacked_bytes, names, executables, pushed_by)
VALUES ($1, $2, $3, $4, $5, $6, $7)
ON CONFLICT (sha256) DO NOTHING
RETURNING sha256

-- name: find
-- One bundle with everything in it.
SELECT sha256, bytes, unpacked_bytes, cardinality(names) AS files, 'bootstrap' = ANY(executables) AS has_bootstrap,
       pushed_by, created_at, names
FROM bundle WHERE sha256 = $1

-- name: listings
-- What deploys check entrypoints against.
SELECT sha256, names, executables, unpacked_bytes FROM bundle WHERE sha256 = ANY($1::text[])

-- name: page
-- Bundles, newest first.
SELECT seq, sha256, bytes, unpacked_bytes, cardinality(names) AS files,
       'bootstrap' = ANY(executables) AS has_bootstrap, pushed_by, created_at
FROM bundle WHERE seq < $1 ORDER BY seq DESC LIMIT $2
