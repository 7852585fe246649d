"""How many replicas each pool should have, and what makes it so."""
