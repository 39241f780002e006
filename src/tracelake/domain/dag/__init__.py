"""A DAG from YAML to a deploy plan: parse, fingerprint, compare.

Pure; the store executes the plan.
"""
