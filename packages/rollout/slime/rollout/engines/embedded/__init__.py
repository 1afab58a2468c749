"""The embedded engine: SGLang's HTTP protocol over a model of `transformers`, on a CPU or one GPU, as a process.

    python -m slime.rollout.engines.embedded --model-path DIR --port 30000

Read in this order: `server` (endpoints), `scheduler` (who runs when), `continuous` (a batch and its cache), `dense`
(the forward pass), `sampling`. Models that `dense` does not compute go through `padded` and transformers.
"""
