"""Training loops: synchronous, one-step-off and fully asynchronous; and the services that they call."""
