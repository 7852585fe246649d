"""A whole cluster in virtual time, made of the modules that serve in production."""
