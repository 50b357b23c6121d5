"""The contract between stages: memory layout and reference executor. docs/protocol.md is its design record."""
