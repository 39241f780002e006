-- Buffered tables: rows of many producers, merged by one sink. A row is identified by its declared key; the higher
-- revision wins, and of equal ones the one made later. The content of a table follows from which messages came, not
-- from their order: retractions are remembered, so that a late batch is retracted as it is merged. A schema may
-- declare `revision` and count as it likes; retraction goes by `made_at_revision` alone, which is the platform's.

-- The table of a buffered dataset, with its key, its indexes and its row in `tracelake.buffer`.
CREATE OR REPLACE FUNCTION tracelake.create_buffer_table(version uuid, columns jsonb, key_columns text[])
RETURNS void LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    target text := format('data.%I', tracelake.table_of(version));
    declared text;
BEGIN
    SELECT string_agg(format('%I %s%s', c ->> 0, (c ->> 1)::regtype,
                             CASE WHEN c ->> 0 = ANY (key_columns) THEN ' NOT NULL' ELSE '' END), ', ' ORDER BY place)
    INTO declared
    FROM jsonb_array_elements(columns) WITH ORDINALITY AS u(c, place) WHERE c ->> 0 <> 'revision';
    EXECUTE format(
        'CREATE TABLE %s (%s, position bigint NOT NULL, producer text NOT NULL, scope_start bigint, scope_end bigint,
                          revision bigint NOT NULL, made_at_revision bigint NOT NULL, written_at timestamptz NOT NULL,
                          retracted_at timestamptz, UNIQUE (%s))', target, declared, tracelake.quoted_list(key_columns));
    EXECUTE format('CREATE INDEX ON %s (position)', target);
    EXECUTE format('CREATE INDEX ON %s (producer, scope_end)', target);
    IF tracelake.has_column(to_regclass(target), 'block_number') THEN
        EXECUTE format('CREATE INDEX ON %s (block_number)', target);
    END IF;
    INSERT INTO tracelake.buffer (dataset_version, key_columns) VALUES (version, key_columns);
END $$;

-- The same, readable by the reader and by attempts whose ticket names the dataset.
CREATE OR REPLACE FUNCTION tracelake.create_buffer(version uuid, columns jsonb, key_columns text[])
RETURNS void LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM tracelake.create_buffer_table(version, columns, key_columns);
    PERFORM tracelake.let_everything_read(to_regclass(format('data.%I', tracelake.table_of(version))));
    PERFORM tracelake.let_read(t.login, version) FROM tracelake.ticket t WHERE version = ANY (t.reads);
END $$;

-- Makes the table as it is declared, or adds new columns. `columns` is [[name, type], …]. Columns that only the table
-- has are left alone: a sink may know an older schema than the table. A long reader is waited for a little: then the
-- caller has to try again.
CREATE OR REPLACE FUNCTION tracelake.ensure_buffer(version uuid, columns jsonb, key_columns text[])
RETURNS void LANGUAGE plpgsql SET lock_timeout = '2s'
SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    target regclass := to_regclass(format('data.%I', tracelake.table_of(version)));
    known text[];
    differing text;
    added text;
BEGIN
    PERFORM tracelake.lock_version(version);
    SELECT b.key_columns INTO known FROM tracelake.buffer b WHERE b.dataset_version = version;
    IF target IS NULL AND known IS NULL THEN
        PERFORM tracelake.create_buffer(version, columns, key_columns);
        RETURN;
    ELSIF target IS NULL OR known IS NULL THEN
        RAISE EXCEPTION 'the dataset''s table % what the database knows of it',
                        CASE WHEN target IS NULL THEN 'is gone, unlike' ELSE 'is there without' END
        USING ERRCODE = 'TL002';
    END IF;
    IF NOT (known @> key_columns AND known <@ key_columns) THEN
        RAISE EXCEPTION 'the key can''t change from (%) to (%)',
                        array_to_string(known, ', '), array_to_string(key_columns, ', ') USING ERRCODE = 'TL002';
    END IF;
    SELECT string_agg(format('%s is %s, not %s', c ->> 0, a.atttypid::regtype, (c ->> 1)::regtype), ', ')
               FILTER (WHERE a.attname IS NOT NULL),
           string_agg(format('ADD COLUMN %I %s', c ->> 0, (c ->> 1)::regtype), ', ') FILTER (WHERE a.attname IS NULL)
    INTO differing, added
    FROM jsonb_array_elements(columns) c
    LEFT JOIN pg_attribute a ON a.attrelid = target AND a.attname = c ->> 0 AND a.attnum > 0 AND NOT a.attisdropped
    WHERE a.atttypid IS DISTINCT FROM (c ->> 1)::regtype::oid;
    IF differing IS NOT NULL THEN
        RAISE EXCEPTION 'columns can''t change their type: %', differing USING ERRCODE = 'TL002';
    END IF;
    IF added IS NOT NULL THEN
        EXECUTE format('ALTER TABLE %s ', target) || added;
    END IF;
END $$;

-- A session's own table, into which its rows are loaded before they are merged; empty at the end of every
-- transaction. `#` numbers the rows from 1 on, under a name that no schema can declare.
CREATE OR REPLACE FUNCTION tracelake.stage_buffer(version uuid, staging_table text, names text[])
RETURNS void LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF to_regclass(format('pg_temp.%I', staging_table)) IS NULL THEN
        EXECUTE format('CREATE TEMP TABLE %I ON COMMIT DELETE ROWS AS SELECT 0::bigint AS "#", %s FROM data.%I
                        WITH NO DATA', staging_table, tracelake.quoted_list(names), tracelake.table_of(version));
    END IF;
END $$;

-- Retracts a producer's rows about these blocks that were made before the revision: those that are there and, by the
-- remembered retraction, those that are still to come. A row is about its block, or else about its whole scope.
-- Returns how many were retracted.
CREATE OR REPLACE FUNCTION tracelake.retract_rows(
    version uuid, whose text, first_block bigint, last_block bigint, below bigint, base bigint
) RETURNS bigint LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    target regclass := to_regclass(format('data.%I', tracelake.table_of(version)));
    span int8range := int8range(first_block, last_block, '[]');
    about text := 'scope_end BETWEEN $2 AND $3 AND scope_start >= $2';
    found bigint;
BEGIN
    IF NOT EXISTS (SELECT FROM tracelake.buffer_retraction r WHERE r.dataset_version = version
                   AND r.producer = whose AND r.revision >= below AND r.blocks @> span) THEN
        DELETE FROM tracelake.buffer_retraction r
        WHERE r.dataset_version = version AND r.producer = whose AND r.revision <= below AND r.blocks <@ span;
        INSERT INTO tracelake.buffer_retraction (dataset_version, producer, blocks, revision)
        VALUES (version, whose, span, below);
    END IF;
    IF tracelake.has_column(target, 'block_number') THEN
        about := format('block_number IS NULL AND %s UNION ALL
                         SELECT ctid, position FROM %s WHERE producer = $1 AND made_at_revision < $4
                         AND retracted_at IS NULL AND block_number BETWEEN $2 AND $3', about, target);
    END IF;
    EXECUTE format(
        'UPDATE %1$s t SET retracted_at = now(), position = $5 + found.place
         FROM (SELECT at, row_number() OVER (ORDER BY position) AS place
               FROM (SELECT ctid AS at, position FROM %1$s
                     WHERE producer = $1 AND made_at_revision < $4 AND retracted_at IS NULL AND %2$s) hit) found
         WHERE t.ctid = found.at', target, about) USING whose, first_block, last_block, below, base;
    GET DIAGNOSTICS found = ROW_COUNT;
    RETURN found;
END $$;

-- Merges staged rows into the table. `starts` are the numbers of the rows that batches begin with. Of several rows
-- with one key the highest revision counts, of equal ones the one made at the highest, and then the first; the same
-- holds against rows that are there already. A row that is only repeated, under a revision that its schema declares
-- itself, keeps its position: no consumer needs to read it again. Returns how many were written, and the highest
-- position.
CREATE OR REPLACE FUNCTION tracelake.merge_rows(
    version uuid, staging_table text, starts bigint[], producers text[], scope_starts bigint[], scope_ends bigint[],
    revisions bigint[], base bigint, OUT written bigint, OUT highest bigint
) LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    target regclass := to_regclass(format('data.%I', tracelake.table_of(version)));
    staged regclass := to_regclass(format('pg_temp.%I', staging_table));
    own_revision boolean := tracelake.has_column(staged, 'revision');
    keys text := (SELECT tracelake.quoted_list(key_columns) FROM tracelake.buffer WHERE dataset_version = version);
    names text[] := ARRAY(SELECT attname FROM pg_attribute WHERE attrelid = staged AND attnum > 0
                          AND attname NOT IN ('#', 'revision') ORDER BY attnum);
    -- Mostly no retraction is newer than the staged rows, and then rows need not be checked one by one.
    late boolean := EXISTS (SELECT FROM tracelake.buffer_retraction r
                            WHERE r.dataset_version = version AND r.producer = ANY (producers)
                            AND r.revision > (SELECT min(v) FROM unnest(revisions) v));
BEGIN
    EXECUTE format(
        'WITH merged AS (
             INSERT INTO %1$s AS t (%2$s, position, producer, scope_start, scope_end, revision, made_at_revision,
                                    written_at, retracted_at)
             SELECT %2$s, $7 + "#", ($3)["#batch"], ($4)["#batch"], ($5)["#batch"], "#revision", "#made_at",
                    now(), %3$s
             FROM (SELECT DISTINCT ON (%4$s) * FROM (
                       SELECT n.*, %5$s AS "#revision", ($6)["#batch"] AS "#made_at"
                       FROM (SELECT s.*, width_bucket(s."#", $2) AS "#batch" FROM %6$s s) n) r
                   ORDER BY %4$s, "#revision" DESC, "#made_at" DESC, "#") s
             ON CONFLICT (%4$s) DO UPDATE SET %7$s, position = %8$s, producer = excluded.producer,
                 scope_start = excluded.scope_start, scope_end = excluded.scope_end, revision = excluded.revision,
                 made_at_revision = excluded.made_at_revision, written_at = excluded.written_at,
                 retracted_at = excluded.retracted_at
             WHERE (t.revision, t.made_at_revision) < (excluded.revision, excluded.made_at_revision)
             RETURNING t.position)
         SELECT count(*), max(position) FROM merged',
        target, tracelake.quoted_list(names),
        CASE WHEN late THEN format(
            'CASE WHEN EXISTS (SELECT FROM tracelake.buffer_retraction r
                               WHERE r.dataset_version = $1 AND r.producer = ($3)["#batch"]
                               AND r.revision > "#made_at" AND r.blocks @> int8range(%s, ''[]'')) THEN now() END',
            CASE WHEN 'block_number' = ANY (names)
                 THEN 'coalesce(block_number, ($4)["#batch"]), coalesce(block_number, ($5)["#batch"])'
                 ELSE '($4)["#batch"], ($5)["#batch"]' END)
             ELSE 'NULL' END,
        keys, CASE WHEN own_revision THEN 'coalesce(n.revision, ($6)["#batch"])' ELSE '($6)["#batch"]' END,
        staged, tracelake.quoted_list(names, '%1$I = excluded.%1$I'),
        CASE WHEN own_revision THEN format(
            'CASE WHEN (%s, t.revision, t.retracted_at IS NULL)
                       IS DISTINCT FROM (%s, excluded.revision, excluded.retracted_at IS NULL)
                  THEN excluded.position ELSE t.position END',
            tracelake.quoted_list(names, 't.%I'), tracelake.quoted_list(names, 'excluded.%I'))
             ELSE 'excluded.position' END)
    INTO written, highest
    USING version, starts, producers, scope_starts, scope_ends, revisions, base;
END $$;

-- The commit of a sink's batches: under the version's lock, if the fence still holds, it applies retractions and
-- staged rows, and records the event with the dataset's new position. That event replaces the sink's pending ones,
-- which it includes.
CREATE OR REPLACE FUNCTION tracelake.merge_buffer(
    version uuid, dataset uuid, task uuid, my_epoch bigint, staging_table text,
    starts bigint[], producers text[], scope_starts bigint[], scope_ends bigint[], revisions bigint[],
    retracting text[], retracted_starts bigint[], retracted_ends bigint[], retracted_revisions bigint[],
    OUT written bigint, OUT retracted bigint, OUT reached bigint, OUT outbox bigint
) LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    everything int8range := int8range(0, 9223372036854775806, '[]');
    upto bigint;
BEGIN
    PERFORM tracelake.lock_version(version);
    IF NOT tracelake.fence_holds(version, my_epoch, everything, '{}') OR NOT EXISTS (
        SELECT FROM tracelake.fence
        WHERE dataset_version = version AND task_id = task AND epoch = my_epoch AND span @> everything
    ) THEN
        RAISE EXCEPTION 'a newer sink has begun on this dataset' USING ERRCODE = 'TL001';
    END IF;
    SELECT b.position INTO STRICT reached FROM tracelake.buffer b WHERE b.dataset_version = version;
    written := 0;
    retracted := 0;
    FOR place IN 1 .. cardinality(retracting) LOOP
        retracted := retracted + tracelake.retract_rows(
            version, retracting[place], retracted_starts[place], retracted_ends[place], retracted_revisions[place],
            reached + retracted);
    END LOOP;
    upto := reached + retracted;
    IF cardinality(producers) > 0 THEN
        SELECT m.written, greatest(upto, m.highest) INTO written, upto
        FROM tracelake.merge_rows(
            version, staging_table, starts, producers, scope_starts, scope_ends, revisions, upto) m;
    END IF;
    IF upto > reached THEN
        UPDATE tracelake.buffer SET position = upto WHERE dataset_version = version;
    END IF;
    reached := upto;
    DELETE FROM tracelake.outbox WHERE task_id = task;
    IF reached > 0 THEN
        INSERT INTO tracelake.outbox (task_id, events)
        VALUES (task, jsonb_build_array(jsonb_build_object(
            'dataset_uuid', dataset, 'dataset_version', version, 'cursor', reached)))
        RETURNING outbox_id INTO outbox;
    END IF;
END $$;

-- Wakes processes that follow the dataset. With the rights of its owner: PUBLIC may not notify.
CREATE OR REPLACE FUNCTION tracelake.signal_rows(version uuid) RETURNS void LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF version IS NULL THEN
        RAISE null_value_not_allowed USING MESSAGE = 'signal_rows needs a dataset version';
    END IF;
    PERFORM pg_notify('tracelake_rows', version::text);
END $$;
