"""The demo: one DAG through Spark, Python and a sandboxed function, with things killed on the way."""
