"""Conversion of examples to rows: `feature_converter` makes model features, `rows` packs examples."""
