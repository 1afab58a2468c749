"""Prompts: the tokenizer, what the chat template makes of messages, and images."""
