"""Pure functions on arrays: attention, cross-entropy, dropout. No parameters, no configuration."""
