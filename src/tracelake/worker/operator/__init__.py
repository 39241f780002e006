"""Inside an operator process: one attempt after another, spoken for by the wrapper."""
