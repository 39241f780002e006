-- name: open
-- A login for one attempt, which may read these versions and stage under this epoch.
SELECT tracelake.open_ticket($1, $2, $3, $4, $5, $6::uuid[])

-- name: close
-- The attempt is over.
SELECT tracelake.close_ticket($1)

-- name: renew
-- The attempts are under way.
SELECT tracelake.renew_tickets($1::text[])

-- name: sweep
-- Tickets that nobody renews.
SELECT tracelake.sweep_tickets()

-- name: leftover_staging
-- Staging tables of attempts that have no ticket (any more), so that nobody fills or commits them, as statements that
-- drop them.
SELECT format('DROP TABLE IF EXISTS staging.%I', c.relname)
FROM pg_class c
WHERE c.relnamespace = 'staging'::regnamespace AND c.relkind = 'r' AND starts_with(c.relname::text, 'staging_')
  AND NOT EXISTS (
      SELECT FROM tracelake.ticket k
      WHERE replace(k.task_id::text, '-', '') = split_part(c.relname::text, '_', 2)
        AND k.epoch::text = split_part(c.relname::text, '_', 4))
LIMIT 100

-- name: wait_little
-- What an attempt that still runs is loading isn't waited for: it is swept another time.
SET LOCAL lock_timeout = '100ms'
