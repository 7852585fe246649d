"""One module per role, each the body of one process: `python -m launcher.roles.router`."""
