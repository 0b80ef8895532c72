"""Configuration: gin parsing with T5X's flags, validated dataclasses, and errors that are sentences."""
