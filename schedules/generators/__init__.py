"""The published pipeline schedules, one generator in each file: it takes sizes and returns rows of compute actions."""
