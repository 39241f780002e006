"""Queries over committed Parquet files by HTTP, beside plain DuckDB on the same files."""
