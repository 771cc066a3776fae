"""What ``python -m mm_capacity.inspect`` shows."""
