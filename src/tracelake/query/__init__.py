"""The Query Service: SQL over datasets for people and for tasks, without a way to reach anything else."""
