"""Corpora from web crawls: reading, cleaning, removal of duplicates, on Apache Beam."""
