"""``evm_ingest``: a range of blocks as verified Parquet tables, each block fetched once."""
