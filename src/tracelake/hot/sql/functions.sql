-- name: applied
-- The hashes of the sets that were applied, the last one being in force.
SELECT sha256 FROM installation.function_set ORDER BY number

-- name: fix_search_path
-- Pin search_path of every function, so that callers can't redirect names to objects of their own. Every definition
-- sets it; this also covers one that forgot it.
DO $$
DECLARE
    each regprocedure;
BEGIN
    FOR each IN SELECT p.oid::regprocedure FROM pg_proc p
                WHERE p.pronamespace IN ('tracelake'::regnamespace, 'staging'::regnamespace)
    LOOP
        EXECUTE format('ALTER FUNCTION %s SET search_path = pg_catalog, pg_temp', each);
    END LOOP;
END $$

-- name: record
-- Record the hash in the transaction that applies the functions.
INSERT INTO installation.function_set (sha256) VALUES ($1)
