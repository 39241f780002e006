-- A trigger of a backfill: the task that it becomes is bulk work, also after it was kept.
ALTER TABLE source_request ADD COLUMN bulk boolean NOT NULL DEFAULT false;

-- When a secret was rotated out. Before that time, which comes again when the clock is set back, it isn't accepted: so
-- no clock makes its overlap longer.
ALTER TABLE installation.webhook_secret ADD COLUMN rotated_at timestamptz;
UPDATE installation.webhook_secret SET rotated_at = least(tl_now(), expires_at) WHERE expires_at IS NOT NULL;
