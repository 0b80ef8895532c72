"""Prompt templates: `template` renders a record, `files` reads template files."""
