pytest_plugins = ["tracelake.testing.postgres", "tracelake.testing.state"]
