"""``parquet_compact``: final rows of hot tables as Parquet files, as an ingest would have written them."""
