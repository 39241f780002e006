"""Chain profiles: how blocks of other chains differ from Ethereum's, one module per family of chains."""
