"""The embedded engine: SGLang's HTTP protocol over `transformers`, on a CPU or one GPU, in a process of its own.

    python -m slime.rollout.engines.embedded --model-path DIR --port 30000

Read in this order: `server` (endpoints), `scheduler` (who runs when), `decode` (a batch and its cache), `sampling`.
"""
