"""Sources of prompts: files of prompts and their readers, and sources in the process of a rollout function."""
