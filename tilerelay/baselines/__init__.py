"""What an expert would run instead of a pipeline: each method a small module, all on the same operands."""
