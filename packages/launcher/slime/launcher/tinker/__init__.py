"""A service for the `tinker` SDK that trains and samples on this machine."""
