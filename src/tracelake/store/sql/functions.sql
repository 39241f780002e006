-- name: add_bundle
-- Adding a bundle again has no effect.
INSERT INTO bundle (sha256, org_id, bytes, unpacked_bytes, names, executables, pushed_by)
VALUES ($1, $2, $3, $4, $5, $6, $7)
ON CONFLICT (sha256) DO NOTHING
RETURNING sha256

-- name: find_bundle
-- One bundle with the names of its files.
SELECT sha256, bytes, unpacked_bytes, cardinality(names) AS files, 'bootstrap' = ANY(executables) AS has_bootstrap,
       pushed_by, created_at, names
FROM bundle WHERE sha256 = $1

-- name: bundle_listings
-- The contents against which deploys check entrypoints.
SELECT sha256, names, executables, unpacked_bytes FROM bundle WHERE sha256 = ANY($1::text[])

-- name: page_of_bundles
-- Bundles, newest first.
SELECT seq, sha256, bytes, unpacked_bytes, cardinality(names) AS files,
       'bootstrap' = ANY(executables) AS has_bootstrap, pushed_by, created_at
FROM bundle WHERE seq < $1 ORDER BY seq DESC LIMIT $2

-- name: register_invoker
-- An invoker is present; returns whether it was absent before.
WITH before AS (
    SELECT 1 FROM invoker WHERE url = $1 AND concurrency > 0 AND seen_at > tl_now() - make_interval(secs => $3)
), registered AS (
    INSERT INTO invoker (url, concurrency, seen_at) VALUES ($1, $2, tl_now())
    ON CONFLICT (url) DO UPDATE SET concurrency = excluded.concurrency, seen_at = excluded.seen_at
)
SELECT NOT EXISTS (SELECT 1 FROM before) AS came

-- name: forget_silent_invokers
-- Invokers whose last registration is so old that they won't come back under this address.
DELETE FROM invoker WHERE seen_at < tl_now() - interval '1 day'

-- name: unregister_invoker
-- An invoker is leaving.
DELETE FROM invoker WHERE url = $1

-- name: present_invokers
-- The invokers that run functions right now.
SELECT url, concurrency FROM invoker
WHERE concurrency > 0 AND seen_at > tl_now() - make_interval(secs => $1) ORDER BY url
