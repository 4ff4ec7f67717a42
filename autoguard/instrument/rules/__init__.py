"""One rule for each kind of equation that holds a program. Importing this package registers them."""

from autoguard.instrument.rules import branches, calls, checkpoint, loops, shard_map

__all__ = ["branches", "calls", "checkpoint", "loops", "shard_map"]
