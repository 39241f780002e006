-- name: open
-- A login for one attempt, which may read these versions and stage under this epoch.
SELECT tracelake.open_ticket($1, $2, $3, $4, $5, $6::uuid[])

-- name: close
-- Close the ticket of an ended attempt.
SELECT tracelake.close_ticket($1)

-- name: renew
-- Renew the tickets of running attempts.
SELECT tracelake.renew_tickets($1::text[])

-- name: sweep
-- Close expired tickets.
SELECT tracelake.sweep_tickets()

-- name: leftover_staging
-- Statements that drop the staging tables of attempts without a ticket, which can neither be filled nor committed.
SELECT format('DROP TABLE IF EXISTS staging.%I', c.relname)
FROM pg_class c
WHERE c.relnamespace = 'staging'::regnamespace AND c.relkind = 'r' AND starts_with(c.relname::text, 'staging_')
  AND NOT EXISTS (
      SELECT FROM tracelake.ticket k
      WHERE replace(k.task_id::text, '-', '') = split_part(c.relname::text, '_', 2)
        AND k.epoch::text = split_part(c.relname::text, '_', 4))
LIMIT 100

-- name: wait_little
-- A table that is being loaded right now is left for the next sweep.
SET LOCAL lock_timeout = '100ms'
