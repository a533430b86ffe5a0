"""The commands beside fit, validate, test and predict: a file each."""
