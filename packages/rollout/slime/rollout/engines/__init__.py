"""Inference engines: what serves SGLang's HTTP protocol, how its process is run, and how it is called."""
