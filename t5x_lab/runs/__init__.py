"""Assembling a run from its configuration: the only place that knows every layer. Data are imported when asked for."""
