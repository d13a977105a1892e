"""Corrections of forecasts, and sketches: fitted to a served model, kept in a file, applied."""
