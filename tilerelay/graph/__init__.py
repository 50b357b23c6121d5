"""What is computed where: stages, tiles, their dependencies, and placements. Plain data; no torch, no Triton."""
