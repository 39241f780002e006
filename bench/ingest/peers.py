"""The other readers of chains that we compare with, in an environment of their own."""

from __future__ import annotations

import csv
import subprocess
import sys
import time
import venv
from pathlib import Path

_HERE = Path(__file__).parent
_ENVIRONMENT = _HERE.parents[1] / ".tools" / "bench-peers"
_BATCH = 100
_CRYO = """
import sys, time
import cryo

url, blocks, folder = sys.argv[1:]
began = time.monotonic()
for datatype in ("blocks", "transactions", "logs"):
    cryo.freeze(
        datatype,
        blocks=[f"0:{blocks}"],
        rpc=url,
        output_dir=folder,
        chunk_size=1000,
        max_concurrent_requests=100,
        verbose=False,
        overwrite=True,
    )
print(time.monotonic() - began)
"""
_WORKERS = 4


def peers() -> Path:
    """The folder of the peers' programs; installed, exactly as locked, when they aren't there yet."""
    done = _ENVIRONMENT / "installed"
    lock = (_HERE / "peers.txt").read_text(encoding="utf-8")
    if not done.exists() or done.read_text(encoding="utf-8") != lock:
        venv.create(_ENVIRONMENT, with_pip=True, clear=True)
        python = _ENVIRONMENT / "bin" / "python"
        install = [
            python,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-deps",
            "--require-hashes",
            "-r",
            _HERE / "peers.txt",
        ]
        subprocess.run(install, check=True)
        done.write_text(lock, encoding="utf-8")
    return _ENVIRONMENT / "bin"


def cryo_seconds(url: str, blocks: int, folder: Path) -> float:
    """Of its three calls; starting Python isn't counted, as starting Spark isn't for us."""
    command = [peers() / "python", "-c", _CRYO, url, str(blocks), folder]
    ran = subprocess.run(command, check=True, capture_output=True, text=True)
    return float(ran.stdout.split()[-1])


def ethereum_etl_seconds(url: str, blocks: int, folder: Path) -> float:
    program = str(peers() / "ethereumetl")
    common = ["--provider-uri", url, "--batch-size", str(_BATCH), "--max-workers", str(_WORKERS)]
    files = {name: str(folder / f"{name}.csv") for name in ("blocks", "transactions", "logs")}
    hashes = folder / "hashes.txt"
    began = time.monotonic()
    export = [program, "export_blocks_and_transactions", "--start-block", "0", "--end-block", str(blocks - 1)]
    outputs = ["--blocks-output", files["blocks"], "--transactions-output", files["transactions"]]
    _run([*export, *common, *outputs])
    with open(files["transactions"], encoding="utf-8", newline="") as rows, hashes.open("w") as out:
        out.writelines(f"{row['hash']}\n" for row in csv.DictReader(rows))
    export = [program, "export_receipts_and_logs", "--transaction-hashes", str(hashes)]
    outputs = ["--receipts-output", str(folder / "receipts.csv"), "--logs-output", files["logs"]]
    _run([*export, *common, *outputs])
    return time.monotonic() - began


def _run(command: list[str]) -> None:
    ran = subprocess.run(command, check=False, capture_output=True, text=True)
    if ran.returncode != 0:
        sys.stderr.write(ran.stderr)
        raise SystemExit(f"{Path(command[0]).name} {command[1]} failed")
