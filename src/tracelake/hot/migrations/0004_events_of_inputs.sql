-- What follows from a commit holds for what was read for it: an event that an attempt left unsaid is said by the next
-- one only if that one reads the same revisions. Otherwise it would announce rows that are about to be made again.
ALTER TABLE tracelake.outbox ADD COLUMN inputs jsonb NOT NULL DEFAULT '{}';
