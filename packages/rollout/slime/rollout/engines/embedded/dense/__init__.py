"""Dense Llama, Qwen2 and Qwen3 models on a CPU: oneDNN multiplies, torch or compiled loops do what lies between."""
