"""What happens once a call has failed: the second run, and what it tells. Outside the fast path."""
