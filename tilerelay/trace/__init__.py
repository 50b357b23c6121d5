"""What happened in a run: the event table of all tiles, its analysis, and its exports. No torch, no Triton."""
