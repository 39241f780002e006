"""The sink: the one writer of every buffered dataset.

Jobs publish records to queues; the sink drains each dataset's queue into its table under a lease of its own. A
message is acknowledged after its rows are committed and the event that follows was accepted, so it may be
killed anywhere: what comes again changes nothing.
"""
