"""Rules for what the bindings of T5X become, by topic. Each module has `RULES`, by scope and name."""
