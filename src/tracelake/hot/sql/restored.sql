-- name: forget_fences
-- An attempt whose fence is gone commits nothing; the next one writes its own.
WITH gone AS (DELETE FROM tracelake.fence RETURNING 1) SELECT count(*) FROM gone
