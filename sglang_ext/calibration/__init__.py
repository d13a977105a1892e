"""Corrections of forecasts: how they are fitted to a served model, kept in a file and applied."""
