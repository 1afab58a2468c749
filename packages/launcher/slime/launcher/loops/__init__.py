"""Training loops: synchronous, one step off and fully asynchronous."""
