-- Tables of dataset versions: made like the first rows that are committed to them, indexed and partitioned.

-- The name of a dataset version's table in the schema `data`.
CREATE OR REPLACE FUNCTION tracelake.table_of(version uuid) RETURNS text LANGUAGE sql IMMUTABLE
SET search_path = pg_catalog, pg_temp AS $$ SELECT 'd_' || replace(version::text, '-', '') $$;

-- plpgsql, since it is called often and a session keeps the plans of this language.
CREATE OR REPLACE FUNCTION tracelake.has_column(relation regclass, name text) RETURNS boolean
LANGUAGE plpgsql STABLE
SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RETURN EXISTS (SELECT FROM pg_attribute
                   WHERE attrelid = relation AND attname = name AND attnum > 0 AND NOT attisdropped);
END $$;

-- Names as a list of identifiers, each in the given form.
CREATE OR REPLACE FUNCTION tracelake.quoted_list(names text[], form text DEFAULT '%I') RETURNS text LANGUAGE sql IMMUTABLE
SET search_path = pg_catalog, pg_temp AS $$
    SELECT coalesce(string_agg(format(form, name), ', ' ORDER BY place), '')
    FROM unnest(names) WITH ORDINALITY AS u(name, place)
$$;

-- How many blocks make a partition of a table; null for a table without partitions. Kept as the table's comment.
CREATE OR REPLACE FUNCTION tracelake.partition_blocks(target regclass) RETURNS bigint LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp AS $$
    SELECT (obj_description(c.oid, 'pg_class')::jsonb ->> 'partition_blocks')::bigint
    FROM pg_class c WHERE c.oid = target AND c.relkind = 'p'
$$;

-- The reader reads every new table. Default privileges grant that too, but the reader can drop those.
CREATE OR REPLACE FUNCTION tracelake.let_everything_read(target regclass) RETURNS void LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    EXECUTE format('GRANT SELECT ON %s TO tracelake_reader', target);
EXCEPTION WHEN undefined_object THEN
    NULL;  -- It hasn't been made yet; the install that makes it lets it read all that there is.
END $$;

-- An attempt's login reads a dataset version: now, if there is a table, and otherwise when the first commit makes it.
-- A login that has just been dropped reads nothing any more.
CREATE OR REPLACE FUNCTION tracelake.let_read(login text, version uuid) RETURNS void LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    target regclass := to_regclass(format('data.%I', tracelake.table_of(version)));
BEGIN
    IF target IS NOT NULL THEN
        EXECUTE format('GRANT SELECT ON %s TO %I', target, login);
    END IF;
EXCEPTION WHEN undefined_object THEN
    NULL;
END $$;

-- A table like the rows that are committed to it first. It is partitioned if the layout asks for that and the key
-- allows it: a unique key of a partitioned table has to contain the block.
CREATE OR REPLACE FUNCTION tracelake.create_table(name text, staged regclass, key_columns text[], layout jsonb)
RETURNS regclass LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    size bigint := (layout ->> 'partition_blocks')::bigint;
    by_block boolean := tracelake.has_column(staged, 'block_number');
    target regclass;
    indexed text[];
    missing text;
BEGIN
    IF cardinality(key_columns) > 0 AND NOT 'block_number' = ANY (key_columns) OR NOT by_block THEN
        size := NULL;
    END IF;
    EXECUTE format('CREATE TABLE data.%I (LIKE %s)', name, staged)
            || CASE WHEN size IS NOT NULL THEN ' PARTITION BY RANGE (block_number)' ELSE '' END;
    target := to_regclass(format('data.%I', name));
    IF size IS NOT NULL THEN
        EXECUTE format('COMMENT ON TABLE %s IS %L', target, jsonb_build_object('partition_blocks', size));
    END IF;
    IF cardinality(key_columns) > 0 THEN
        EXECUTE format('ALTER TABLE %s ADD UNIQUE (%s)', target,
                       (SELECT string_agg(format('%I', k), ', ' ORDER BY place)
                        FROM unnest(key_columns) WITH ORDINALITY AS u(k, place)));
    END IF;
    IF by_block AND NOT EXISTS (SELECT FROM jsonb_array_elements(layout -> 'indexes') i
                                WHERE i ->> 0 = 'block_number') THEN
        EXECUTE format('CREATE INDEX ON %s (block_number)', target);
    END IF;
    FOR indexed IN SELECT ARRAY(SELECT jsonb_array_elements_text(i)) FROM jsonb_array_elements(layout -> 'indexes') i
    LOOP
        SELECT string_agg(k, ', ') INTO missing
        FROM unnest(indexed) k WHERE NOT tracelake.has_column(staged, k);
        IF missing IS NOT NULL THEN
            RAISE EXCEPTION 'there is no column to index: %', missing USING ERRCODE = 'TL002';
        END IF;
        EXECUTE format('CREATE INDEX ON %s (%s)', target,
                       (SELECT string_agg(format('%I', k), ', ' ORDER BY place)
                        FROM unnest(indexed) WITH ORDINALITY AS u(k, place)));
    END LOOP;
    RETURN target;
END $$;

-- The table of a dataset version, made if there is none yet; refuses rows with other columns than it has.
CREATE OR REPLACE FUNCTION tracelake.ensure_table(version uuid, staged regclass, key_columns text[], layout jsonb)
RETURNS regclass LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    name text := tracelake.table_of(version);
    target regclass := to_regclass(format('data.%I', name));
    differing text;
BEGIN
    IF target IS NULL THEN
        target := tracelake.create_table(name, staged, key_columns, layout);
        PERFORM tracelake.let_everything_read(target);
        PERFORM tracelake.let_read(t.login, version) FROM tracelake.ticket t WHERE version = ANY (t.reads);
        RETURN target;
    END IF;
    SELECT string_agg(coalesce(s.attname, t.attname), ', ') INTO differing
    FROM (SELECT attname, atttypid FROM pg_attribute
          WHERE attrelid = staged AND attnum > 0 AND NOT attisdropped) s
    FULL JOIN (SELECT attname, atttypid FROM pg_attribute
               WHERE attrelid = target AND attnum > 0 AND NOT attisdropped) t
      ON s.attname = t.attname AND s.atttypid = t.atttypid
    WHERE s.attname IS NULL OR t.attname IS NULL;
    IF differing IS NOT NULL THEN
        RAISE EXCEPTION 'the staged rows have other columns than the dataset: %', differing USING ERRCODE = 'TL002';
    END IF;
    RETURN target;
END $$;

-- Makes the partitions that the staged rows need, at most 256 for one commit.
CREATE OR REPLACE FUNCTION tracelake.ensure_partitions(target regclass, staged regclass, first_block bigint, last_block bigint)
RETURNS void LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    size bigint := tracelake.partition_blocks(target);
    base text := (SELECT relname FROM pg_class WHERE oid = target);
    starts bigint[];
    start bigint;
    part text;
BEGIN
    IF size IS NULL OR first_block IS NULL THEN
        RETURN;
    END IF;
    IF first_block / size = last_block / size THEN
        starts := ARRAY[first_block / size * size];
    ELSE
        EXECUTE format('SELECT array_agg(DISTINCT s) FROM (SELECT DISTINCT block_number / %1$s * %1$s AS s FROM %2$s) d',
                       size, staged) INTO starts;
    END IF;
    starts := ARRAY(SELECT s FROM unnest(starts) s
                    WHERE to_regclass(format('data.%I', base || '_p' || s)) IS NULL ORDER BY s);
    IF cardinality(starts) > 256 THEN
        RAISE EXCEPTION 'the rows of one commit would make % partitions of % blocks: use larger ones',
                        cardinality(starts), size USING ERRCODE = 'TL002';
    END IF;
    FOREACH start IN ARRAY starts LOOP
        part := format('data.%I', base || '_p' || start);
        EXECUTE format('CREATE TABLE %s (LIKE %s)', part, target);
        EXECUTE format('ALTER TABLE %s ATTACH PARTITION %s FOR VALUES FROM (%s) TO (%s)',
                       target, part, start, start + size);
        PERFORM tracelake.let_everything_read(to_regclass(part));
    END LOOP;
END $$;
