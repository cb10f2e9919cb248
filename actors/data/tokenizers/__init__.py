"""Tokenizers: examples as text, chat templates, token ids."""
