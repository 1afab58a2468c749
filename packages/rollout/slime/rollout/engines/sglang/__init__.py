"""SGLang as an engine: its flags, and its processes. Nothing here imports sglang: that takes long and needs CUDA."""
