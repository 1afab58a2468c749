"""A service that the `tinker` SDK talks to: it trains and samples on this machine."""
