"""Benchmarks, each started by ``python -m bench.NAME``; the README describes them."""
