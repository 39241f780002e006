-- name: rows
-- A year of work that is done: a million tasks with their attempts, partitions and events, and beside them
-- another job's backlog, given-up deliveries and old invalidations.
ALTER TABLE partition DROP CONSTRAINT partitions_never_overlap;
CREATE TEMP TABLE kept AS
    SELECT indexname, indexdef FROM pg_indexes
    WHERE tablename IN ('task', 'attempt', 'partition', 'event') AND indexname NOT LIKE '%\_pkey';
DO $$ DECLARE name text; BEGIN
    FOR name IN SELECT indexname FROM kept LOOP EXECUTE format('DROP INDEX %I', name); END LOOP;
    FOREACH name IN ARRAY '{task,attempt,partition,event}'::text[] LOOP
        EXECUTE format('ALTER TABLE %I SET UNLOGGED', name);
    END LOOP;
END $$;
CREATE TEMP TABLE j AS
    SELECT job.name, job.job_id, job.org_id, dv.dataset_version, dv.version_no
    FROM job JOIN dataset_version dv USING (job_id) WHERE job.active AND dv.output_index = 0;
INSERT INTO task (task_id, org_id, job_id, kind, status, range_start, range_end, scope_key, attempt, last_outcome,
                  worker_id, lease_token, lease_expires_at, epoch, inputs, output_revisions, ended_at)
SELECT lpad(to_hex(n), 32, '0')::uuid, j.org_id, j.job_id,
       CASE WHEN j.name = 'up' THEN 'cursor' ELSE 'partition' END,
       CASE WHEN n % 100 = 99 THEN 'Failed' WHEN n % 100 = 98 THEN 'Canceled' ELSE 'Completed' END,
       CASE WHEN j.name <> 'up' THEN n * 10 END, CASE WHEN j.name <> 'up' THEN n * 10 + 9 END,
       CASE WHEN j.name <> 'up' THEN '0;0' END, 1, 'Completed', 'w', lpad(to_hex(n), 32, 'f')::uuid, tl_now(), n,
       CASE WHEN j.name = 'up' THEN jsonb_build_array(jsonb_build_object(
           'input_index', 0, 'after', n * 10 - 1, 'upto', n * 10 + 9)) ELSE '[]' END, '{}', tl_now() - interval '1 day'
FROM generate_series(1, 1000000) n
JOIN j ON j.name = CASE WHEN n % 10 = 9 THEN 'up' WHEN n % 10 = 8 THEN 'next' ELSE 'work' END;
INSERT INTO attempt (task_id, attempt, worker_id, lease_token, epoch, claimed_at, ended_at, outcome, result)
SELECT task_id, 1, 'w', lease_token, epoch, ended_at, ended_at, 'Completed', '{}' FROM task WHERE attempt = 1;
INSERT INTO partition (dataset_version, version_no, range_start, range_end, stored, current, revision, task_id,
                       attempt, row_count, committed_at)
SELECT j.dataset_version, j.version_no, n * 10, n * 10 + 9, j.name = 'work', true, 0,
       lpad(to_hex(n), 32, '0')::uuid, 1, 1, tl_now() - interval '1 day'
FROM generate_series(1, 1000000) n
JOIN j ON j.name = CASE WHEN n % 10 = 0 THEN 'work' ELSE 'src' END;
INSERT INTO event (org_id, dataset_version, task_id, attempt, kind, range_start, range_end, revision, state)
SELECT j.org_id, j.dataset_version, lpad(to_hex(n), 32, '0')::uuid, 1, 'partition', n * 10, n * 10 + 9, 0, 'counted'
FROM generate_series(1, 1000000) n JOIN j ON j.name = 'work';
INSERT INTO task (task_id, org_id, job_id, kind, status, range_start, range_end, scope_key)
SELECT gen_random_uuid(), j.org_id, j.job_id, 'partition', 'Queued', n, n, '0;0'
FROM generate_series(1, 20000) n JOIN j ON j.name = 'other';
INSERT INTO task (task_id, org_id, job_id, kind, status, range_start, range_end, scope_key, attempt, worker_id,
                  lease_token, lease_expires_at, epoch)
SELECT gen_random_uuid(), j.org_id, j.job_id, 'partition', 'Running', n, n, '0;0', 1, 'w', gen_random_uuid(),
       tl_now() + interval '1 day', n
FROM generate_series(100001, 102000) n JOIN j ON j.name = 'other';
INSERT INTO outbox (kind, runtime, task_id, payload, available_at, failed_at)
SELECT 'wake', 'ecs_python', gen_random_uuid(), '{}', tl_now(), CASE WHEN n % 2 = 0 THEN tl_now() END
FROM generate_series(1, 1) n;
INSERT INTO outbox (kind, runtime, task_id, payload, available_at, failed_at)
SELECT 'wake', 'ecs_python', gen_random_uuid(), '{}', tl_now() + make_interval(days => 1 + n % 2),
       CASE WHEN n % 2 = 0 THEN tl_now() END
FROM generate_series(1, 40000) n;
INSERT INTO invalidation (dataset_version, invalidation_id, range_start, range_end, revision)
SELECT j.dataset_version, n::text, n, n, n FROM generate_series(1, 20000) n JOIN j ON j.name = 'other';
UPDATE dataset_version SET revision = 20000 WHERE dataset_version = (SELECT dataset_version FROM j WHERE name = 'other');
UPDATE consumer_cursor SET cursor = 10000009;
INSERT INTO dataset_cursor (dataset_version, cursor) SELECT dataset_version, 10000009 FROM j WHERE name = 'head';
DO $$ DECLARE def text; BEGIN
    FOR def IN SELECT indexdef FROM kept LOOP EXECUTE def; END LOOP;
END $$;
ALTER TABLE partition ADD CONSTRAINT partitions_never_overlap EXCLUDE USING gist (
    int8range(version_no, version_no, '[]') WITH &&,
    int8range(range_start, range_end, '[]') WITH &&
) WHERE (current AND stored);
DROP TABLE j, kept

-- name: analyze
-- The planner knows how much there is.
VACUUM ANALYZE

-- name: function
-- A function's text and its parameters, so that its own queries can be explained.
SELECT p.prosrc, p.proargnames, array(SELECT format_type(t, NULL) FROM unnest(p.proargtypes) t) AS types
FROM pg_proc p WHERE p.proname = $1 AND p.pronamespace = 'public'::regnamespace
