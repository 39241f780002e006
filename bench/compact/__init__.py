"""Hot rows to Parquet, measured."""

import os

# gRPC, which Spark's client brings along, would start its threads again in every process that is started here.
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"
