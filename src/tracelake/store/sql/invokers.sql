-- name: register
-- An invoker says that it is there; answers whether nobody knew.
WITH before AS (
    SELECT 1 FROM invoker WHERE url = $1 AND concurrency > 0 AND seen_at > tl_now() - make_interval(secs => $3)
), said AS (
    INSERT INTO invoker (url, concurrency, seen_at) VALUES ($1, $2, tl_now())
    ON CONFLICT (url) DO UPDATE SET concurrency = excluded.concurrency, seen_at = excluded.seen_at
)
SELECT NOT EXISTS (SELECT 1 FROM before) AS came

-- name: forget_silent
-- Those that have said nothing for so long that they won't come back under this address.
DELETE FROM invoker WHERE seen_at < tl_now() - interval '1 day'

-- name: unregister
-- It said that it is going away.
DELETE FROM invoker WHERE url = $1

-- name: present
-- Who runs functions right now.
SELECT url, concurrency FROM invoker
WHERE concurrency > 0 AND seen_at > tl_now() - make_interval(secs => $1) ORDER BY url
