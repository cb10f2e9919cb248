"""Models of Hugging Face: config.json to models of raypar and back, and models of transformers."""
