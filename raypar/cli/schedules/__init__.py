"""Commands that draw, check, simulate and compare schedules."""
