"""The limit: a client that asks for the same blocks and receipts and drops the answers, byte by byte unread."""

from __future__ import annotations

import http.client
import threading
import time
from urllib.parse import urlsplit

import orjson

_BATCH = 50
_CONNECTIONS = 4
_PIECE = 1 << 20


def download_seconds(url: str, blocks: int) -> tuple[float, int]:
    """How long it takes, and how many bytes there are."""
    batches = [range(start, min(start + _BATCH, blocks)) for start in range(0, blocks, _BATCH)]
    sizes: list[int] = []
    began = time.monotonic()
    threads = [
        threading.Thread(target=_download, args=(url, batches[number::_CONNECTIONS], sizes))
        for number in range(_CONNECTIONS)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.monotonic() - began, sum(sizes)


def _download(url: str, batches: list[range], sizes: list[int]) -> None:
    place = urlsplit(url)
    connection = http.client.HTTPConnection(place.hostname or "", place.port)
    headers = {"content-type": "application/json"}
    for numbers in batches:
        calls = [
            {"jsonrpc": "2.0", "id": 2 * number + part, "method": method, "params": [hex(number), *more]}
            for number in numbers
            for part, (method, more) in enumerate(
                [("eth_getBlockByNumber", [True]), ("eth_getBlockReceipts", [])]
            )
        ]
        connection.request("POST", place.path or "/", orjson.dumps(calls), headers)
        answer = connection.getresponse()
        while piece := answer.read(_PIECE):
            sizes.append(len(piece))
    connection.close()
