"""The Spark of ``ecs_spark``: a supervised Connect server or a remote one, and the sessions that attempts get."""
