"""Rules that keep, change or drop lines and pages."""
