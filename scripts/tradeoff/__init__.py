"""Behind `plot tradeoff`: what a system costs a language model, against what its steps take."""
