"""Starting, replacing and ending a job's actors."""
