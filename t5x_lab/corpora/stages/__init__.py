"""Stages that write files, spread over workers with Apache Beam."""
