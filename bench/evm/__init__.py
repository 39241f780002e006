"""Benchmarks of single functions of ``tracelake.evm``."""
