"""Removal of duplicate URLs, lines, spans and pages across a corpus."""
