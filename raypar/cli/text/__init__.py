"""Commands that generate, converse and evaluate."""
