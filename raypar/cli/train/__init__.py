"""`raypar train`, `sft` and what they share: dry runs, resuming, samples."""
