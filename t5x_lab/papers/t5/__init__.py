"""T5 suite (Raffel et al. 2020): `suite` tasks and mixtures, `metrics`, `typed_records` for files in place of TFDS."""
