"""A Spark client without the server's token. A module of its own, since the neighbour's process imports it."""

from __future__ import annotations

import os
from typing import Any

import grpc
from pyspark.sql.connect.proto import base_pb2

_METHOD = "/spark.connect.SparkConnectService/AnalyzePlan"


def talk_to_spark(ports: list[int]) -> list[str]:
    """The ports on which a session can be had without the token, or with another."""
    os.environ["GRPC_VERBOSITY"] = "NONE"
    request: Any = base_pb2.AnalyzePlanRequest(session_id="00000000-0000-4000-8000-000000000001")
    request.spark_version.SetInParent()
    found: list[str] = []
    for port in ports:
        for metadata in ((), (("authorization", "Bearer x"),)):
            with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
                call = channel.unary_unary(
                    _METHOD,
                    request_serializer=base_pb2.AnalyzePlanRequest.SerializeToString,
                    response_deserializer=base_pb2.AnalyzePlanResponse.FromString,
                )
                try:
                    call(request, timeout=5, metadata=metadata)
                    found.append(str(port))
                except grpc.RpcError:
                    pass
    return found
