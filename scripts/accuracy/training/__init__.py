"""Trains the models that the evaluation runs: recipes, batches, the loop, the export, the card."""
