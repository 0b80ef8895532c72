"""Data sets of records, and the templates that put them into words."""
