"""What makes pages of the chapters, the notebooks and the code that they tell of."""
