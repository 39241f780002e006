-- name: create_view
-- A relation of the query, under the name that the query uses.
CREATE VIEW {name} AS {rows}

-- name: replace_view
-- The same relation with the digits of its integers; several statements of one connection may need it.
CREATE OR REPLACE VIEW {name} AS {rows}

-- name: drop_view
-- Remove the warm-up relation before a caller's SQL arrives.
DROP VIEW {name}

-- name: rows_of
-- The rows of one source: a list of files, or an Arrow table.
SELECT {columns} FROM {source}

-- name: no_rows_of
-- Columns without rows.
SELECT {columns} FROM {source} WHERE false

-- name: settings
-- Read settings back from the engine.
SELECT {settings}

-- name: columns_of_files
-- The types, nulls and values of these columns in each file; no number of nulls where a part of the file has none.
SELECT file_name, path_in_schema, CASE WHEN min(type) = max(type) THEN min(type) END,
       CASE WHEN count(stats_null_count) = count(*) THEN sum(stats_null_count) END, sum(num_values)
FROM parquet_metadata([{files}]) WHERE path_in_schema IN ({columns}) GROUP BY file_name, path_in_schema
