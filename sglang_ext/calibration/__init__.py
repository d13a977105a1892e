"""Corrections of forecasts: how they are fitted to a served model, kept in a file and applied.

collecting   normal equations of the hidden states and queries that a server computes
fitting      the correction of a projection that they ask for
files        a folder with the corrections of a model, and a card that says of which
"""
