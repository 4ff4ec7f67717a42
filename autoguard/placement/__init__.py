"""What is judged where, and what is tested: pure functions over a jaxpr."""
