"""How long steps and transfers will take: fitted online, shared by all who decide by it."""
