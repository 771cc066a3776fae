"""The parts of ``scripts/compare_at_equal_load.py``."""
