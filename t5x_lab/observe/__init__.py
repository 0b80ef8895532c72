"""Observation of runs: metrics files, console, TensorBoard, parameter table, plots, profiles, hardware, collectives.

Modules here do not change a run.
"""
