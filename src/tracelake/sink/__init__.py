"""The sink: the only writer of every buffered dataset.

Jobs publish records to queues; the sink drains each dataset's queue into its table under its own lease. A message
is acknowledged after its rows are committed and the Dispatcher has accepted the event about them, so the sink may
be killed at any point: a message that is delivered again changes nothing.
"""
