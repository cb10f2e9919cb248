"""The published schedules, one generator a file: sizes in, rows of compute actions out."""
