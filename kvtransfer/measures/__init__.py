"""Pure functions of tensors: what a map explains, what a prediction costs, how sure we are."""
