"""What the guard costs: `python -m benchmarks.run` compares guarded steps with plain `jax.jit`.

All contenders live in one process and take turns in rounds, each with a step, state and compiled program of
its own. A time is divided by plain `jax.jit`'s time in the same round, so that what slows the machine down
slows both; the table shows medians and quartiles of those ratios. One contender is a second copy of the
plain step: how far its ratio is from 1 is how far the others can be trusted.

A workload is an entry of `workloads.WORKLOADS`, a contender one of `contenders.CONTENDERS`.
"""
