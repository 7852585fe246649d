"""A worker's face: owns the sockets of clients and peers, so that the step loop never does."""
