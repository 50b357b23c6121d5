"""Measuring: methods interleaved round by round, results that say where they come from, and the report made of them."""
