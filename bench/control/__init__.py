"""The control-plane benchmark: real processes, full durability, results as ratios to plain commits."""
