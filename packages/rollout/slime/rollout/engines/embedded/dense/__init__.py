"""Dense Llama, Qwen2 and Qwen3 models on a CPU: oneDNN or compiled loops multiply, torch or loops do the rest."""
