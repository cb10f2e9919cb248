"""Examples for fine-tuning: their files, their conversion, their packing into sequences."""
