"""Accuracy evaluation: a recipe says what is measured and what must hold, and the result says whether it does."""
