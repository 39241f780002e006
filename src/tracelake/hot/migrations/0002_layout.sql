-- Tables laid out for those who read them: indexes for what is looked up, partitions by ranges of blocks. And commits
-- that take several staging tables, of which each must hold as many rows as were loaded into it.

DROP FUNCTION tracelake.commit_output(uuid, uuid, bigint, jsonb, bigint, bigint, text, boolean, text[]);
DROP FUNCTION tracelake.ensure_table(uuid, regclass, text[]);

-- How many blocks make a partition of a table; null for a table that isn't partitioned. Kept as the table's comment.
CREATE FUNCTION tracelake.partition_blocks(target regclass) RETURNS bigint LANGUAGE sql STABLE AS $$
    SELECT (obj_description(c.oid, 'pg_class')::jsonb ->> 'partition_blocks')::bigint
    FROM pg_class c WHERE c.oid = target AND c.relkind = 'p'
$$;

CREATE FUNCTION tracelake.has_column(relation regclass, name text) RETURNS boolean LANGUAGE sql STABLE AS $$
    SELECT EXISTS (SELECT FROM pg_attribute
                   WHERE attrelid = relation AND attname = name AND attnum > 0 AND NOT attisdropped)
$$;

-- A table like the rows that are committed to it first. It is partitioned if that was asked for and can be: a unique
-- key of a partitioned table has to contain the block.
CREATE FUNCTION tracelake.create_table(name text, staged regclass, key_columns text[], layout jsonb)
RETURNS regclass LANGUAGE plpgsql AS $$
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

-- The table of a dataset version, made if there is none yet; refuses rows of other columns than it has.
CREATE FUNCTION tracelake.ensure_table(version uuid, staged regclass, key_columns text[], layout jsonb)
RETURNS regclass LANGUAGE plpgsql AS $$
DECLARE
    name text := tracelake.table_of(version);
    target regclass := to_regclass(format('data.%I', name));
    differing text;
BEGIN
    IF target IS NULL THEN
        RETURN tracelake.create_table(name, staged, key_columns, layout);
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

-- The partitions that these rows fall into, and no others. Attaching one, unlike creating it in its place, doesn't
-- wait for those who read the table, nor make them wait.
CREATE FUNCTION tracelake.ensure_partitions(target regclass, staged regclass, first_block bigint, last_block bigint)
RETURNS void LANGUAGE plpgsql AS $$
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
    END LOOP;
END $$;

-- What of a staging table isn't as it was left: somebody else's rows, or none after a crash. Nobody can load into it
-- from here to the end of the transaction. Answers the first and the last block.
CREATE FUNCTION tracelake.check_staged(
    staged regclass, expected bigint, first_block bigint, last_block bigint, appends boolean,
    OUT lowest bigint, OUT highest bigint
) LANGUAGE plpgsql AS $$
DECLARE
    found bigint;
    outside bigint := 0;
BEGIN
    EXECUTE format('LOCK TABLE %s IN SHARE ROW EXCLUSIVE MODE', staged);
    IF tracelake.has_column(staged, 'block_number') THEN
        EXECUTE format('SELECT count(*), count(*) FILTER (WHERE block_number IS NULL OR block_number NOT BETWEEN $1 AND $2),
                               min(block_number), max(block_number) FROM %s', staged)
        INTO found, outside, lowest, highest USING first_block, last_block;
    ELSIF appends THEN
        EXECUTE format('SELECT count(*) FROM %s', staged) INTO found;
    ELSE
        RAISE EXCEPTION 'rows of an output that is replaced by range need a column block_number'
        USING ERRCODE = 'TL002';
    END IF;
    IF found <> expected THEN
        RAISE EXCEPTION '% rows were staged in %, and % are there', expected, staged, found USING ERRCODE = 'TL003';
    END IF;
    IF outside > 0 AND NOT appends THEN
        RAISE EXCEPTION '% staged rows lie outside of blocks % to %', outside, first_block, last_block
        USING ERRCODE = 'TL002';
    END IF;
END $$;

-- The commit of one output: under the version's lock, if the fence still holds, the range is replaced by the staged
-- rows (or they are added, for an output that appends). Staging tables are gone after it, or empty if they are kept.
CREATE FUNCTION tracelake.commit_output(
    version uuid, task uuid, my_epoch bigint, my_inputs jsonb, first_block bigint, last_block bigint,
    staging_tables text[], staged_rows bigint[], kept boolean, appends boolean, key_columns text[], layout jsonb
) RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
    my_span int8range := int8range(first_block, last_block, '[]');
    target regclass := to_regclass(format('data.%I', tracelake.table_of(version)));
    staged regclass;
    blocks record;
    columns text;
    inserted bigint;
    total bigint := 0;
BEGIN
    PERFORM tracelake.lock_version(version);
    IF NOT tracelake.fence_holds(version, my_epoch, my_span, my_inputs) OR NOT EXISTS (
        SELECT FROM tracelake.fence
        WHERE dataset_version = version AND task_id = task AND epoch = my_epoch AND span @> my_span
    ) THEN
        RAISE EXCEPTION 'a newer attempt has begun on these blocks' USING ERRCODE = 'TL001';
    END IF;
    IF target IS NOT NULL AND NOT appends THEN
        EXECUTE format('DELETE FROM %s WHERE block_number BETWEEN $1 AND $2', target) USING first_block, last_block;
    END IF;
    FOR place IN 1 .. cardinality(staging_tables) LOOP
        staged := to_regclass(format('staging.%I', staging_tables[place]));
        IF staged IS NULL THEN
            RAISE EXCEPTION 'the staging table % is gone', staging_tables[place] USING ERRCODE = 'TL003';
        END IF;
        blocks := tracelake.check_staged(staged, staged_rows[place], first_block, last_block, appends);
        target := tracelake.ensure_table(version, staged, key_columns, layout);
        IF staged_rows[place] > 0 THEN
            PERFORM tracelake.ensure_partitions(target, staged, blocks.lowest, blocks.highest);
            SELECT string_agg(format('%I', attname), ', ') INTO columns
            FROM pg_attribute WHERE attrelid = staged AND attnum > 0 AND NOT attisdropped;
            EXECUTE format('INSERT INTO %1$s (%2$s) SELECT %2$s FROM %3$s', target, columns, staged)
                    || CASE WHEN appends THEN ' ON CONFLICT DO NOTHING' ELSE '' END;
            GET DIAGNOSTICS inserted = ROW_COUNT;
            total := total + inserted;
        END IF;
        IF kept THEN
            EXECUTE format('DELETE FROM %s', staged);
        ELSE
            EXECUTE format('DROP TABLE %s', staged);
        END IF;
    END LOOP;
    RETURN total;
END $$;
