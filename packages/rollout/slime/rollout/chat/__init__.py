"""The chat protocols of OpenAI and Anthropic: requests, messages, templates and answers."""
