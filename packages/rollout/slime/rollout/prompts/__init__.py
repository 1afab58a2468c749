"""Prompts: loads the tokenizer, renders messages with the chat template, encodes text and images."""
