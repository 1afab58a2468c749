"""SGLang as an engine: its flags and its processes. Nothing here imports sglang, which is slow and requires CUDA."""
