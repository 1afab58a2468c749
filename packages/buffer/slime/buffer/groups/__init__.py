"""Groups of samples from prompt to committed step: leases, steps and checks, evaluation sets, the place in the data."""
