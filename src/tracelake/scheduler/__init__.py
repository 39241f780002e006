"""The scheduler: evaluates the schedules of cron sources and sends their ticks to the Dispatcher."""
