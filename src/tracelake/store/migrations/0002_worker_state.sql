-- What workers tell of an attempt while it runs, and what they leave for the next one.

-- Progress belongs to the attempt that reported it: a new claim begins without any, an ended attempt keeps its
-- last. It stands here and not on the task's row, which every heartbeat writes anew; no index has the column, so
-- an update stays on its page.
ALTER TABLE attempt ADD COLUMN progress jsonb;

-- A job's state is kept by task, `key` being the task's id: an always-on source has one task per generation, and
-- one scope must not resume from another's. `input_revisions` are those that the saving attempt read: what was
-- derived from an input that was taken back since is no place to resume from.
ALTER TABLE operator_state ADD COLUMN input_revisions bigint[] NOT NULL DEFAULT '{}';

-- The revisions in an attempt's frozen inputs, by input.
CREATE FUNCTION input_revisions(inputs jsonb) RETURNS bigint[] LANGUAGE sql IMMUTABLE
    AS $$
        SELECT coalesce(array_agg((i->>'revision')::bigint ORDER BY (i->>'input_index')::int), '{}')
        FROM jsonb_array_elements(inputs) i
    $$;
