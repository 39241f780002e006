-- Why a job is paused, one row per cause: it goes on when the last cause is gone. `job.paused` says whether there is any
-- and changes in the same transaction, under the lock on the job's row, so that claims and routing read no other table.
CREATE TABLE job_pause (
    job_id uuid NOT NULL REFERENCES job,
    cause  text NOT NULL CHECK (cause <> ''),
    actor  text,
    since  timestamptz NOT NULL DEFAULT tl_now(),
    PRIMARY KEY (job_id, cause)
);

INSERT INTO job_pause (job_id, cause, actor, since)
SELECT j.job_id, 'person', p.actor, coalesce(p.at, tl_now())
FROM job j LEFT JOIN LATERAL (
    SELECT actor, at FROM audit
    WHERE action = 'pause' AND subject->>'job' = j.dag_name || '/' || j.name
    ORDER BY audit_id DESC LIMIT 1) p ON true
WHERE j.paused;
