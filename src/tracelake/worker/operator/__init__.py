"""Inside an operator process: one attempt after another; the wrapper calls the Dispatcher on its behalf."""
