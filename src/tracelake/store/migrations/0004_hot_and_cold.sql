-- A compacted dataset is one table in two places: files of a version that `parquet_compact` writes, and the rows of
-- the hot version that it makes them of. Which one that is follows from the job: its outputs stand in the order of
-- its inputs in Postgres. A generation never changes, so neither does this.
CREATE FUNCTION hot_counterpart(cold uuid) RETURNS uuid LANGUAGE sql STABLE
    AS $$
        SELECT hot.dataset_version
        FROM dataset_version c JOIN job j USING (job_id)
        CROSS JOIN LATERAL (
            SELECT ji.dataset_version, row_number() OVER (ORDER BY ji.input_index) - 1 AS place
            FROM job_input ji JOIN dataset_version dv USING (dataset_version)
            WHERE ji.job_id = j.job_id AND dv.storage = 'postgres') hot
        WHERE c.dataset_version = cold AND j.operator = 'parquet_compact' AND hot.place = c.output_index
    $$;
