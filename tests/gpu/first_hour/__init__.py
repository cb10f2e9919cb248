"""All that the first hour with a GPU can measure, in one command."""
