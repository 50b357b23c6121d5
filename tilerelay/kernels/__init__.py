"""Device code: synchronisation primitives, prologue, epilogue, and the GEMMs that carry them."""
