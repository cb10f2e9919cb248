"""Schedules that are read from files of torch's pipelines and from code of the user's."""
