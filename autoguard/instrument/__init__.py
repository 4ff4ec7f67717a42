"""From a plan to a program that carries one code."""
