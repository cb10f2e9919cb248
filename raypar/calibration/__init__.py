"""``raypar calibrate``: measures the speeds that predictions need on the user's machines, on actors like a run's."""
